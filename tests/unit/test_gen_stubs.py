"""scripts/gen_stubs.sh, and the environment of its own that it keeps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gen_stubs.sh"


def test_an_environment_whose_interpreter_is_gone_is_made_again(tmp_path: Path) -> None:
    """As after an update of the system's Python. The list of what is installed is still there."""
    text = SCRIPT.read_text()
    pins = {name: value for name, _, value in (line.partition("=") for line in text.splitlines()) if name.isupper()}
    wanted = [pins[name].partition(" #")[0].strip("'") for name in ("GRPCIO_TOOLS", "MYPY_PROTOBUF", "SETUPTOOLS")]
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".installed").write_text(" ".join(wanted) + "\n")
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    # The interpreter of the new environment: it is asked for one, and then fails.
    env = {**os.environ, "PYTHON": "false", "PROTO_VENV": str(venv)}
    done = subprocess.run([str(SCRIPT), "--check"], env=env, capture_output=True, text=True, timeout=60)
    assert "installing the stub generator" in done.stdout, done.stderr
    assert done.returncode == 1
    # One that runs is kept; this one then generates nothing.
    (venv / "bin").mkdir(parents=True)
    (venv / ".installed").write_text(" ".join(wanted) + "\n")
    (venv / "bin" / "python").symlink_to("/bin/true")
    done = subprocess.run([str(SCRIPT), "--check"], env=env, capture_output=True, text=True, timeout=60)
    assert "installing the stub generator" not in done.stdout
