"""The record of refused calls and of operators' calls: a file of JSON lines, without keys and without prompts.

A thread writes it, so that a slow disk holds up no call. A bounded number of lines waits for the thread; lines beyond
are lost and counted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

FILE_MODE = 0o600
# Refused calls cost a stranger nothing, so in each second those beyond this number are counted instead of written.
MAX_REFUSALS_A_SECOND = 100
# The same for known callers that asked for more than a limit allows; few, so that they do not hide other refusals.
MAX_LIMITED_A_SECOND = 10
MAX_FIELD_CHARACTERS = 256
# Most lines that wait for the disk: some ten megabytes, with fields of the largest size.
MAX_WAITING_LINES = 4096
# Seconds that `close` waits for the last lines.
CLOSE_S = 2.0
# Least seconds between two lines about lost lines in the process's log.
COMPLAINT_S = 60.0

_log = logging.getLogger(__name__)


class AuditLog:
    """One line for each event, written soon. Lines that cannot be written, or only in part, are counted in
    `lost_lines`, so that a full disk does not stop serving. If the file is moved away, as log rotation does, a new file
    is begun at its path.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since 1970. Raises OSError if the file cannot be opened."""
        self._path = path
        self._now = now
        self._file = _open(path)
        # Only a regular file is rotated, not a terminal, for example.
        self._may_move = stat.S_ISREG(os.fstat(self._file).st_mode)
        # Whether the file ends with a part of a line, for whose rest there was no room.
        self._cut = _is_cut(path)
        self._second = -1
        self._refusals = self._limited = self._left_out = 0
        self._complained_at = -math.inf
        # Lines lost in the calling thread, and lines lost in the writer: each number is changed on one thread only.
        self._not_taken = self._not_written = 0
        self._closed = False
        # None ends the writer.
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._writer = threading.Thread(target=self._write_all, name="audit log", daemon=True)
        self._writer.start()

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written."""
        return self._not_taken + self._not_written

    def refused(self, identity: str, peer: str, call: str, reason: str) -> None:
        """Records a refused call. `identity` is the caller's name, "" if it is not known."""
        now = self._now()
        self._enter(now)
        self._refusals += 1
        self._refuse(now, identity, peer, call, reason, within=self._refusals <= MAX_REFUSALS_A_SECOND)

    def limited(self, identity: str, peer: str, call: str, reason: str) -> None:
        """Records a call of a known caller that was refused by a limit, its tenant's or one that all share."""
        now = self._now()
        self._enter(now)
        self._limited += 1
        self._refuse(now, identity, peer, call, reason, within=self._limited <= MAX_LIMITED_A_SECOND)

    def _refuse(self, now: float, identity: str, peer: str, call: str, reason: str, *, within: bool) -> None:
        if within:
            self._add(now, "refused", identity, peer, call, reason)
        else:
            self._left_out += 1

    def called(self, identity: str, peer: str, call: str, reason: str = "") -> None:
        """Records a call of a known caller that was let in."""
        now = self._now()
        self._enter(now)
        self._add(now, "called", identity, peer, call, reason)

    def close(self) -> None:
        """Adds how many refusals were left out, if any, waits for the last lines and closes the file. Idempotent."""
        if self._closed:
            return
        self._add_left_out(self._now())
        self._closed = True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
            self._writer.join(CLOSE_S)
        # A writer that still waits for the disk ends with the process, which then closes the file.
        if not self._writer.is_alive():
            os.close(self._file)

    def _enter(self, now: float) -> None:
        """Begins a new second, if it is one: refusals are then written again."""
        if int(now) != self._second:
            self._add_left_out(now)
            self._second, self._refusals, self._limited = int(now), 0, 0

    def _add_left_out(self, now: float) -> None:
        if self._left_out:
            self._add(now, "refused", "", "", "", f"refusals left out: {self._left_out}")
            self._left_out = 0

    def _add(
        self, now: float, event: Literal["refused", "called"], identity: str, peer: str, call: str, reason: str
    ) -> None:
        fields = {"identity": identity, "peer": peer, "call": call, "reason": reason}
        clipped = {name: text[:MAX_FIELD_CHARACTERS] for name, text in fields.items()}
        moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        # ASCII only: control characters, other alphabets and lone surrogates are escaped.
        line = (json.dumps({"time": moment, "event": event} | clipped) + "\n").encode("ascii")
        try:
            if self._closed:
                raise queue.Full
            self._waiting.put_nowait(line)
        except queue.Full:
            self._not_taken += 1
            self._complain("lines come faster than the disk takes them")

    def _write_all(self) -> None:
        """The writer's thread."""
        while (line := self._waiting.get()) is not None:
            try:
                self._follow()
                self._write(line)
            except OSError as error:
                self._not_written += 1
                self._complain(str(error))

    def _write(self, line: bytes) -> None:
        """Raises OSError, also if only a part was written."""
        # Behind a part of a line, this one would be unreadable, too.
        data = b"\n" + line if self._cut else line
        # A single write for each line: with O_APPEND, lines of two processes do not mix.
        written = os.write(self._file, data)
        if written:
            self._cut = not data[:written].endswith(b"\n")
        if written < len(data):
            raise OSError("no room on the disk for a whole line")

    def _follow(self) -> None:
        """Opens the path again if it is no longer the open file. Raises OSError."""
        if not self._may_move:
            return
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            same = False
        if not same:
            former, self._file = self._file, _open(self._path)
            self._cut = _is_cut(self._path)
            os.close(former)

    def _complain(self, reason: str) -> None:
        now = self._now()
        # After the clock was set back, the next complaint is written at once.
        if not 0 <= now - self._complained_at < COMPLAINT_S:
            self._complained_at = now
            _log.warning("audit log %s: %s; %d lines lost so far", self._path, reason, self.lost_lines)


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a named pipe that nobody reads would block the process.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    # A file that existed before may be readable by others. A terminal or a pipe keeps its mode.
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, FILE_MODE)
    return file


def _is_cut(path: Path) -> bool:
    """Whether a regular file ends with a part of a line, as one may that an earlier process left on a full disk."""
    with suppress(OSError):
        if path.is_file() and (size := path.stat().st_size):
            with path.open("rb") as file:
                file.seek(size - 1)
                return file.read(1) != b"\n"
    return False
