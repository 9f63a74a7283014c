"""Programs beside the bench: nvidia-smi, compute-sanitizer and ncu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_first import __main__ as command
from gpu_first import tools
from gpu_first.rehearsal import NCU, Stage


def test_ncus_table_is_read() -> None:
    lines = NCU.partition("exec >&3\n")[2]
    text = subprocess.run(["sh", "-c", lines], capture_output=True, text=True, check=True).stdout
    launches = tools.launches_of("what the program said\n" + text)
    assert len(launches) == 3
    assert launches[0]["gpu__time_duration.sum"] == "71.2 us"
    assert launches[0]["Kernel Name"] == "pagekv_decode"
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        tools.launches_of("==ERROR== ERR_NVGPUCTRPERM: no permission")


@pytest.mark.parametrize("status", [0, 1])
def test_memchecks_log_tells_of_a_fault_that_ends_the_program(tmp_path: Path, status: int) -> None:
    """NVIDIA's manual: the exit status is compute-sanitizer's own only if the program succeeded."""
    log = tmp_path / "log"
    command = tools.sanitized("memcheck", log, [sys.executable, "-c", f"raise SystemExit({status})"])
    command[0] = str(Stage(tmp_path).tools / command[0])
    assert subprocess.run(command).returncode == status
    assert tools.names_a_fault(log.read_text()) == bool(status)


def test_the_toolkits_folders_are_behind_what_is_on_path(tmp_path: Path) -> None:
    assert tools.path_with_toolkit("/bin", [tmp_path, tmp_path / "absent"]) == f"/bin{os.pathsep}{tmp_path}"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no nvidia-smi"),
        ("echo No devices were found; exit 6", "nvidia-smi says: No devices were found"),
        ("exit 0", "nvidia-smi says: nothing"),
        ("echo H200; exit 0", "there is no NVIDIA driver"),  # what it says is not taken on trust
    ],
)
def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert command.main(["1", "--folder", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {said}")
    assert "compute capability 8.0" in err
