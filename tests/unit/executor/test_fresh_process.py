"""How long the executor waits before a fresh process takes its place, and as what it comes back."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from typing import NoReturn

import pytest

from pagekv.executor import fresh_process
from pagekv.executor.fresh_process import FAULTS, STEADY_S, faults_before, pause_s, start_anew


class Replaced(Exception):
    """Stands for the end of this process."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that this process was replaced by."""
    found: list[list[str]] = []
    left_behind: list[bool] = []

    def execv(path: str, command: list[str]) -> NoReturn:
        assert path == sys.executable
        assert left_behind.pop()
        found.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-X", "dev", "-m", "pagekv.executor.server", "--listen", "h:0"])
    monkeypatch.setattr(fresh_process, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fresh_process, "_leave_files_behind", lambda: left_behind.append(True))
    # Both, so that what the code under test sets is taken back.
    monkeypatch.setenv(FAULTS, "")
    return found


def anew(served_s: float = 1.0) -> None:
    with pytest.raises(Replaced):
        asyncio.run(start_anew(asyncio.Event(), "h:7", "a fault", served_s))


def test_the_command_line_is_the_same_with_the_port_there_was(commands: list[list[str]]) -> None:
    anew()
    sys.orig_argv[:] = commands[0]
    anew()
    expected = ["-X", "dev", "-m", "pagekv.executor.server", "--listen", "h:0", "--listen", "h:7"]
    assert commands == [[sys.executable, *expected]] * 2


def test_faults_in_a_row_are_counted_across_processes(commands: list[list[str]]) -> None:
    assert faults_before() == 0
    for number in (1, 2, 3):
        anew()
        assert faults_before() == number
    anew(served_s=STEADY_S)
    assert faults_before() == 1


def test_pauses_grow_up_to_a_minute() -> None:
    assert [pause_s(faults) for faults in (1, 2, 3, 4, 8, 9, 10**9)] == [0, 1, 2, 4, 60, 60, 60]


def test_a_stop_ends_the_pause(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_process, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setenv(FAULTS, "5")

    async def main() -> int:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, stop.set)
        async with asyncio.timeout(120):
            return await start_anew(stop, "h:7", "a fault", 1.0)

    assert asyncio.run(main()) == 0
    assert not commands


def test_no_file_goes_on_to_the_next_process() -> None:
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        fresh_process._leave_files_behind()
        assert not os.get_inheritable(file.fileno())
    assert os.get_inheritable(2)
