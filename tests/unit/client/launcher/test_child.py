"""A process, its log and its end. `test_stack.py` has what a stack makes of them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from pagekv.client.launcher.child import KEPT_LINES, Child
from pagekv.client.launcher.errors import StackError


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"cannot start the executor: .*No such file"):
        Child("executor", ["/no/such/program"], lambda: False, tmp_path / "port", None)


def test_the_end_of_the_log_is_told_with_a_death(tmp_path: Path) -> None:
    script = "for number in range(100): print('line', number)\nraise SystemExit(3)"
    child = Child("executor", [sys.executable, "-c", script], lambda: False, tmp_path / "port", None)
    child.wait_until(time.monotonic() + 120)
    told = str(child.death())
    assert told.startswith(f"the executor exited with status 3; its last lines:\n  line {100 - KEPT_LINES}\n")
    assert told.endswith("line 99")


def test_the_colours_of_a_log_are_left_out(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    script = r"print('\x1b[2m02:52\x1b[0m \x1b[1;33m WARN\x1b[0m a\x1b[2Jb')"
    command = [sys.executable, "-c", script]
    child = Child("gateway", command, lambda: False, tmp_path / "port", lambda *each: seen.append(each))
    child.wait_until(time.monotonic() + 120)
    # The terminal that shows a line escapes the rest.
    assert seen == [("gateway", "02:52  WARN a\x1b[2Jb")]
    assert [*child.lines] == ["02:52  WARN a\x1b[2Jb"]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_the_log_has_an_encoding_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    child = Child("executor", [sys.executable, "-c", r"print('\xe4')"], lambda: False, tmp_path / "port", None)
    child.wait_until(time.monotonic() + 120)
    assert [*child.lines] == ["ä"]


def test_of_a_torchrun_that_a_rank_ended_the_words_of_the_rank_are_told(tmp_path: Path) -> None:
    banner = r"print('', '*' * 41, 'Setting OMP_NUM_THREADS environment variable', '*' * 41, sep='\n')"
    script = "print('no such flag', 'W1128 Received 15 death signal, shutting down', 'Traceback', sep='\\n'); exit(1)"
    script = f"{banner}; {script}"
    child = Child("executor", [sys.executable, "-c", script], lambda: False, tmp_path / "port", None)
    child.wait_until(time.monotonic() + 120)
    assert str(child.death()) == "the executor exited with status 1; its last lines:\n  no such flag"


@pytest.mark.parametrize(
    ("number", "name"),
    [(int(signal.SIGKILL), "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_the_signal_that_killed_it_is_told(tmp_path: Path, number: int, name: str) -> None:
    script = f"import os; os.kill(os.getpid(), {number})"
    child = Child("executor", [sys.executable, "-c", script], lambda: False, tmp_path / "port", None)
    child.wait_until(time.monotonic() + 120)
    assert str(child.death()) == f"the executor was killed by {name} and said nothing"


def test_a_log_that_cannot_be_shown_is_read_all_the_same(tmp_path: Path) -> None:
    """Else the process would stand still once its pipe is full."""

    def fail(name: str, line: str) -> None:
        raise BrokenPipeError

    command = [sys.executable, "-c", "for number in range(20_000): print('line', number)"]
    child = Child("manager", command, lambda: False, tmp_path / "port", fail)
    child.wait_until(time.monotonic() + 120)
    assert child.popen.returncode == 0
    assert child.lines[-1] == "line 19999"


def test_nothing_is_left_open(tmp_path: Path) -> None:
    """`python -X dev` prints a warning for each file that is."""
    child = Child("executor", [sys.executable, "-c", "print(1)"], lambda: False, tmp_path / "port", None)
    child.wait_until(time.monotonic() + 120)
    assert child.popen.stdin is not None
    assert child.popen.stdout is not None
    assert child.popen.stdin.closed
    assert child.popen.stdout.closed
