"""A recording: a file that a thread of its own writes while serving goes on; no step waits for it.

States: open → over, by `close` or because the disk is full, too slow or gone. In the latter case the log has one line
about it, and later records are dropped. The file has whole records only. If the process is killed, the records of some
hundredths of a second are lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from itertools import accumulate, count
from pathlib import Path

from pagekv.common.logs import Log

log = Log(__name__)

# Bytes that wait for the disk before the recording is given up.
MAX_UNWRITTEN = 64 * 2**20
# Seconds between two writes. Waking the thread costs more than a record, and a running thread delays the event loop.
PAUSE_S = 0.02
CLOSE_TIMEOUT_S = 5.0

# A record, or a function that makes it on the file's thread.
Record = bytes | Callable[[], bytes]


class RecordingFile:
    """One recording; only the file's owner may read it."""

    def __init__(self, path: Path, what: str) -> None:
        """`what`: the kind of recording, for the log. If `path` exists, a number is added to it. Raises OSError."""
        self._what = what
        self.path, self._file = _create(path)
        self._records: queue.SimpleQueue[tuple[Record, int] | None] = queue.SimpleQueue()
        # Bytes added and written. Only `write` changes the first number, only the thread the second.
        self._added = self._done = 0
        # Bytes in the file.
        self._length = 0
        self.over = False
        self._thread = threading.Thread(target=self._work, name=f"recording of {what}", daemon=True)
        self._thread.start()
        log.info("recording", what=what, file=self.path)

    def write(self, record: Record, size: int) -> None:
        """Adds a record of about `size` bytes; never waits."""
        if self.over:
            return
        self._added += size
        if self._added - self._done > MAX_UNWRITTEN:
            self._give_up(f"the disk is {MAX_UNWRITTEN >> 20} MiB behind")
        else:
            self._records.put((record, size))

    def close(self) -> None:
        """Waits until everything is written, but at most CLOSE_TIMEOUT_S seconds. Idempotent."""
        self.over = True
        self._records.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def discard(self) -> None:
        """Closes and removes the file, unless it is a device or a pipe that was there before."""
        self.close()
        if self.path.is_file():
            self.path.unlink()

    def _give_up(self, reason: object) -> None:
        if not self.over:
            self.over = True
            self._records.put(None)
            log.error("recording ended; serving continues", what=self._what, file=self.path, reason=reason)

    def _work(self) -> None:
        try:
            while waiting := self._take():
                contents: list[bytes] = []
                try:
                    for record, _ in waiting:
                        contents.append(record if isinstance(record, bytes) else record())
                finally:
                    self._append(contents)
                self._done += sum(size for _, size in waiting)
                if not self.over:
                    time.sleep(PAUSE_S)
        except Exception as error:  # the disk's, or of a function that makes a record
            self._give_up(error)
        finally:
            os.close(self._file)

    def _take(self) -> list[tuple[Record, int]]:
        """The waiting records, once there are any; empty at the end."""
        waiting = []
        while (item := self._records.get()) is not None:
            waiting.append(item)
            if self._records.empty():
                return waiting
        self._records.put(None)
        return waiting

    def _append(self, contents: list[bytes]) -> None:
        written, content = 0, memoryview(b"".join(contents))
        try:
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            # A part of a record is of no use, so it is cut off. That fails on files that cannot be truncated.
            whole = max((end for end in accumulate(map(len, contents)) if end <= written), default=0)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length + whole)
            raise
        self._length += written


def _create(path: Path) -> tuple[Path, int]:
    """Opens `path`, or the first of path.1, path.2 and so on that does not exist. Devices and pipes are opened."""
    if path.exists() and not path.is_file():
        return path, os.open(path, os.O_WRONLY)  # of a directory this is the error
    for number in count():
        candidate = path.with_name(f"{path.name}.{number}") if number else path
        with contextlib.suppress(FileExistsError):
            return candidate, os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    raise AssertionError("there is always a next number")
