"""Logs: text for people, JSON for machines, and no way to stop serving."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import threading
from collections.abc import Iterator

import pytest

from pagekv.common.logs import LOG_FORMATS, Log, is_error, setup_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_quotes_values_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("manager", "info", "text")
    Log("here").info("attached", epoch=7, model="my model")
    Log("here").debug("not shown")
    line = capsys.readouterr().err
    assert line.endswith(' info    manager: attached epoch=7 model="my model"\n')
    assert line.count("\n") == 1


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("executor", "debug", "json")
    try:
        raise ValueError("why")
    except ValueError:
        Log("here").exception("broke", step=3)
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["service"], found["message"], found["step"]) == ("error", "executor", "broke", 3)
    assert "ValueError: why" in found["exception"]


@pytest.mark.parametrize("fmt", LOG_FORMATS)
def test_an_error_is_told_by_its_line(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("manager", "debug", fmt)
    log = Log("here")
    for write in (log.debug, log.info, log.warning, log.error):
        write('2026 error  {"level": "error"}', kind="error")
    lines = capsys.readouterr().err.splitlines()
    assert [is_error(line) for line in lines] == [False, False, False, True]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space left")


def test_a_full_disk_loses_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", FullDisk())
    setup_logs("manager", "info", "text")
    Log("here").warning("lost")


@pytest.mark.parametrize("fmt", LOG_FORMATS)
def test_a_pipe_that_nobody_reads_loses_lines_and_holds_up_nobody(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_lines() -> None:
        for n in range(100):
            Log("here").info("flood", n=n, text="x" * 9000)

    reading, writing = os.pipe()
    with open(writing, "w") as stderr, open(reading, "rb", buffering=0) as reader:
        monkeypatch.setattr("sys.stderr", stderr)
        setup_logs("manager", "info", fmt)
        # Longer than a pipe takes at once, and no divisor of its room of 16 pages: one line is written in part.
        flood = threading.Thread(target=write_lines, daemon=True)
        flood.start()
        flood.join(10)
        assert not flood.is_alive()
        first = reader.read(2**20)
        Log("here").info("read again")
        Log("here").info("and again")
        lines = (first + reader.read(2**20)).decode().splitlines()
    whole = sum("flood" in line and len(line) > 9000 for line in lines)
    assert whole <= 10
    for line, lost in ((lines[-2], f"lines_lost_before={100 - whole}"), (lines[-1], "")):
        if fmt == "json":
            assert json.loads(line).get("lines_lost_before", 0) == (100 - whole if lost else 0)
        else:
            assert line.endswith(f" again {lost}" if lost else " again")


def test_a_terminal_that_nobody_reads_loses_lines_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a connection that is dead. It has room for some characters, and none for the next line."""

    def write_lines() -> None:
        for n in range(5000):
            Log("here").info("flood", n=n)

    def read() -> str:
        found = b""
        while select.select([ours], [], [], 0.2)[0]:
            found += os.read(ours, 2**16)
        return found.decode()

    ours, theirs = os.openpty()
    with open(theirs, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        setup_logs("manager", "info", "text")
        flood = threading.Thread(target=write_lines, daemon=True)
        flood.start()
        try:
            flood.join(10)
            assert not flood.is_alive()
            first = read()
            Log("here").info("read again")
            last = read()
        finally:
            # A thread that waits for room goes on.
            os.close(ours)
    whole = len(re.findall(r"flood n=\d+\r\n", first))
    assert 10 < whole < 5000
    assert last.endswith(f"read again lines_lost_before={5000 - whole}\r\n")


def test_a_reader_that_is_gone_loses_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        setup_logs("manager", "info", "text")
        Log("here").warning("lost")
