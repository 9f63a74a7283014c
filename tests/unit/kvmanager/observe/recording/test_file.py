"""Files written while serving goes on: full disks, slow ones, files that are there already."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import wait_until

from pagekv.kvmanager.observe.recording import file as recording_file
from pagekv.kvmanager.observe.recording.file import RecordingFile


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_records_are_written_in_order_also_those_made_by_the_thread(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "a", "things")
    for number in range(100):
        record = b"%d\n" % number
        file.write((lambda record=record: record) if number % 2 else record, len(record))  # type: ignore[misc]  # a lambda with a default
    file.close()
    file.close()
    assert (tmp_path / "a").read_text().split() == [str(number) for number in range(100)]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_what_is_there_already_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    names = []
    for _ in range(3):
        file = RecordingFile(path, "things")
        file.write(b"x", 1)
        file.close()
        names.append(file.path.name)
    assert names == ["a", "a.1", "a.2"]
    assert [(tmp_path / name).read_bytes() for name in names] == [b"x"] * 3


def test_what_is_discarded_is_gone_but_never_a_device(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "a", "things")
    file.write(b"x", 1)
    file.discard()
    assert not [*tmp_path.iterdir()]
    RecordingFile(Path(os.devnull), "things").discard()
    assert Path(os.devnull).exists()


@pytest.mark.parametrize("path", ["", "none/such"])
def test_a_place_that_cannot_be_written_to_is_an_error_at_once(path: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Is a directory|No such file"):
        RecordingFile(tmp_path / path, "things")


def test_a_full_disk_ends_the_recording_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    file = RecordingFile(Path("/dev/full"), "things")
    file.write(b"x" * 100, 100)
    wait_until(lambda: file.over)
    for _ in range(100):
        file.write(b"x" * 100, 100)
    file.close()
    assert errors(caplog) == ["recording ended; serving continues"]


def test_a_record_that_cannot_be_made_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RecordingFile(tmp_path / "a", "things")
    file.write(b"x", 1)
    file.write(lambda: b"y"[7:8].join([None]), 1)  # type: ignore[list-item]  # it raises: the mistake under test
    wait_until(lambda: file.over)
    file.close()
    assert (tmp_path / "a").read_bytes() == b"x"
    assert errors(caplog) == ["recording ended; serving continues"]


def test_a_disk_that_fills_up_leaves_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last record that fits does so in part only."""
    write = os.write

    def write_up_to_1050(descriptor: int, content: bytes) -> int:
        left = 1050 - os.fstat(descriptor).st_size
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:left])

    monkeypatch.setattr(recording_file, "os", SimpleNamespace(**{**vars(os), "write": write_up_to_1050}))
    file = RecordingFile(tmp_path / "a", "things")
    for _ in range(20):
        file.write(b"x" * 99 + b"\n", 100)
    wait_until(lambda: file.over)
    file.close()
    assert (tmp_path / "a").read_bytes() == (b"x" * 99 + b"\n") * 10
    assert errors(caplog) == ["recording ended; serving continues"]


def test_a_disk_that_cannot_keep_up_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody reads."""
    monkeypatch.setattr(recording_file, "MAX_UNWRITTEN", 200_000)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    file = RecordingFile(tmp_path / "pipe", "things")
    for _ in range(500):
        file.write(b"x" * 1000, 1000)
    assert file.over
    assert errors(caplog) == ["recording ended; serving continues"]
    threading.Timer(0.05, os.close, [reader]).start()
    file.close()
