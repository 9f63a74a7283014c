"""The audit log: lines, bounds, and a file that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.clock import Clock
from support.waiting import wait_until

from pagekv.kvmanager.access.audit_log import (
    COMPLAINT_S,
    MAX_FIELD_CHARACTERS,
    MAX_LIMITED_A_SECOND,
    MAX_REFUSALS_A_SECOND,
    MAX_WAITING_LINES,
    AuditLog,
)

NOON = 1_767_268_800.25
CALL = "/pagekv.v1.OperatorService/ResetPrefixCache"


def close(log: AuditLog) -> None:
    """Ends a log; its last lines are written however busy the machine is."""
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr("pagekv.kvmanager.access.audit_log.CLOSE_S", 120.0)
        log.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


def soon_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The lines, once there are so many, of a log that is open."""
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)
    return lines(path)


def until_lost(log: AuditLog, count: int) -> None:
    """Returns once so many lines are lost."""
    wait_until(lambda: log.lost_lines == count)


def test_a_line_for_each_event(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, Clock(NOON))
    log.refused("", "ipv4:10.0.0.1:5", CALL, "unknown key")
    log.called("olga", "unix:", CALL)
    # Now, not when it is closed.
    first, second = soon_lines(path, 2)
    assert first == {
        "time": "2026-01-01T12:00:00.250+00:00",
        "event": "refused",
        "identity": "",
        "peer": "ipv4:10.0.0.1:5",
        "call": CALL,
        "reason": "unknown key",
    }
    assert (second["event"], second["identity"], second["reason"]) == ("called", "olga", "")
    log.close()
    log.close()
    assert len(lines(path)) == 2
    assert log.lost_lines == 0


def test_lines_are_added_to_a_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for name in ("one", "two"):
        log = AuditLog(path, Clock(NOON))
        log.called(name, "", CALL)
        close(log)
    assert [line["identity"] for line in lines(path)] == ["one", "two"]


@pytest.mark.parametrize("mode", [None, 0o666])
def test_nobody_else_reads_the_file(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / "audit.jsonl"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    AuditLog(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_fields_are_bounded_and_stay_on_their_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, Clock(NOON))
    hostile = '\n{"event": "called"}\r\x1b[2J\u2028\ud800"\\'
    log.refused(hostile, "x" * 10_000, hostile, "\x00" * 10_000)
    close(log)
    (line,) = lines(path)
    assert line["identity"] == hostile
    assert [len(line[name]) for name in ("peer", "reason")] == [MAX_FIELD_CHARACTERS] * 2
    text = path.read_bytes()
    assert text.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in text[:-1])
    assert len(text) < 6 * 4 * MAX_FIELD_CHARACTERS + 200


def test_a_flood_of_refusals_is_counted(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit.jsonl", Clock(NOON)
    log = AuditLog(path, clock)
    for _ in range(MAX_REFUSALS_A_SECOND + 50):
        log.refused("", "", CALL, "unknown key")
    # Calls of operators are never left out.
    log.called("olga", "", CALL)
    assert len(soon_lines(path, MAX_REFUSALS_A_SECOND + 1)) == MAX_REFUSALS_A_SECOND + 1
    clock.now += 1
    log.refused("", "", CALL, "unknown key")
    left_out, last = soon_lines(path, MAX_REFUSALS_A_SECOND + 3)[-2:]
    assert (left_out["event"], left_out["reason"]) == ("refused", "refusals left out: 50")
    assert last["reason"] == "unknown key"
    for _ in range(MAX_REFUSALS_A_SECOND):
        log.refused("", "", CALL, "unknown key")
    close(log)
    assert lines(path)[-1]["reason"] == "refusals left out: 1"


def test_calls_over_a_limit_hide_no_caller_who_is_refused(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit.jsonl", Clock(NOON)
    log = AuditLog(path, clock)
    for _ in range(MAX_LIMITED_A_SECOND + MAX_REFUSALS_A_SECOND):
        log.limited("alice", "", CALL, "max_calls: your tenant has 2 of at most 2, and asked for 1 more")
    log.refused("", "", CALL, "unknown key")
    clock.now += 1
    log.limited("alice", "", CALL, "max_queue")
    close(log)
    found = lines(path)
    assert [line["reason"][:11] for line in found[MAX_LIMITED_A_SECOND - 1 :]] == [
        "max_calls: ", "unknown key", "refusals le", "max_queue",
    ]  # fmt: skip  # several a line
    assert found[-2]["reason"] == f"refusals left out: {MAX_REFUSALS_A_SECOND}"
    assert {(line["event"], line["identity"]) for line in found[:MAX_LIMITED_A_SECOND]} == {("refused", "alice")}


def test_a_disk_that_is_full_is_counted_and_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Clock(NOON)
    log = AuditLog(tmp_path / "audit.jsonl", clock)
    monkeypatch.setattr("pagekv.kvmanager.access.audit_log.os.write", full)
    for _ in range(5):
        log.called("olga", "", CALL)
    wait_until(lambda: log.lost_lines == 5)
    assert len(caplog.records) == 1
    assert "No space left on device; 1 lines lost so far" in caplog.text
    clock.now += COMPLAINT_S
    log.called("olga", "", CALL)
    wait_until(lambda: log.lost_lines == 6)
    wait_until(lambda: len(caplog.records) == 2)
    monkeypatch.setattr("pagekv.kvmanager.access.audit_log.os.write", lambda file, data: 1)
    log.called("olga", "", CALL)
    close(log)
    assert log.lost_lines == 7


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    """A limit of the size of files stands in for the disk."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, Clock(NOON))
    log.called("one", "", CALL)
    soon_lines(path, 1)
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for a part of a line, and then for the end of that line.
    for lost, more in enumerate((20, 1, 0), 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
        try:
            log.called("lost", "", CALL)
            until_lost(log, lost)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    log.called("two", "", CALL)
    close(log)
    first, part, last = path.read_text("ascii").splitlines()
    assert [json.loads(line)["identity"] for line in (first, last)] == ["one", "two"]
    assert len(part) == 20
    assert log.lost_lines == 3


def test_a_part_of_a_line_that_a_former_process_left_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time": "2026')
    log = AuditLog(path, Clock(NOON))
    log.called("one", "", CALL)
    close(log)
    part, line = path.read_text("ascii").splitlines()
    assert (part, json.loads(line)["identity"]) == ('{"time": "2026', "one")


def test_a_file_that_is_begun_behind_a_line_that_was_cut_off_has_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "audit.jsonl", os.write
    log = AuditLog(path, Clock(NOON))
    with monkeypatch.context() as full:
        full.setattr("pagekv.kvmanager.access.audit_log.os.write", lambda file, data: real(file, data[:20]))
        log.called("lost", "", CALL)
        until_lost(log, 1)
    path.unlink()
    log.called("one", "", CALL)
    close(log)
    assert [line["identity"] for line in lines(path)] == ["one"]


def test_a_disk_that_stands_still_holds_up_no_call_and_few_lines_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, real = threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        goes_on.wait(60)
        return real(file, data)

    log = AuditLog(tmp_path / "audit.jsonl", Clock(NOON))
    with monkeypatch.context() as patched:
        patched.setattr("pagekv.kvmanager.access.audit_log.os.write", write)
        begun = time.monotonic()
        for _ in range(MAX_WAITING_LINES + 100):
            log.called("olga", "", CALL)
        assert time.monotonic() - begun < 20
        # One is being written.
        assert 99 <= log.lost_lines <= 100
        goes_on.set()
        close(log)
    assert len(lines(tmp_path / "audit.jsonl")) == MAX_WAITING_LINES + 100 - log.lost_lines


def test_the_end_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("pagekv.kvmanager.access.audit_log.CLOSE_S", 0.1)
    monkeypatch.setattr("pagekv.kvmanager.access.audit_log.os.write", lambda file, data: goes_on.wait(60) and len(data))
    log = AuditLog(tmp_path / "audit.jsonl", Clock(NOON))
    log.called("olga", "", CALL)
    begun = time.monotonic()
    log.close()
    assert time.monotonic() - begun < 20
    goes_on.set()
    log._writer.join(60)


def test_a_file_that_was_moved_away_is_begun_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = AuditLog(path, Clock(NOON))
    log.called("one", "", CALL)
    soon_lines(path, 1)
    path.rename(moved)
    log.called("two", "", CALL)
    soon_lines(path, 1)
    path.unlink()
    log.called("three", "", CALL)
    close(log)
    assert [line["identity"] for line in lines(moved) + lines(path)] == ["one", "three"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_after_the_end_a_line_is_lost_and_counted(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.close()
    log.refused("", "", CALL, "unknown key")
    assert log.lost_lines == 1


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AuditLog(tmp_path / "none" / "audit.jsonl")
    with pytest.raises(IsADirectoryError):
        AuditLog(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_reads_holds_up_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        AuditLog(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(tmp_path / "pipe")
    for _ in range(2000):
        log.called("olga", "x" * 256, CALL)
    log.close()
    assert log.lost_lines > 0
    os.close(reader)
