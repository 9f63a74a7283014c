"""Modules of others that end with the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.stack import environment

MODULE = """
import subprocess, sys, time
print(__name__, *sys.argv[1:], flush=True)
if "path" in sys.argv:
    subprocess.run([sys.executable, "-c", "import sys; print(sys.flags.safe_path)"], check=True)
if "stay" in sys.argv:
    time.sleep(600)
sys.exit(7)
"""


@pytest.mark.parametrize(("word", "status"), [("go", 7), ("stay", -signal.SIGTERM)])
def test_a_module_gets_its_arguments_and_ends_with_its_parent(word: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE)
    env = environment()
    env["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, "-m", "pagekv.client.launcher.with_parent", "theirs", word, "--flag=1"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"__main__ {word} --flag=1\n"
        if word == "stay":
            process.stdin.close()
        assert process.wait(60) == status


@pytest.mark.parametrize(("flags", "safe"), [((), "False\n"), (("-P",), "True\n")])
def test_the_path_of_modules_is_passed_on(flags: tuple[str, ...], safe: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE)
    env = environment()
    env["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, *flags, "-m", "pagekv.client.launcher.with_parent", "theirs", "path"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"__main__ path\n{safe}"
