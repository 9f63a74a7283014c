"""Logs: text for people, JSON for machines, and no way to stop serving."""

from __future__ import annotations

import io
import json
import logging
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
