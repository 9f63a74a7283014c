"""The record of refusals and of what operators did: a file of JSON lines, without keys and without prompts."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

FILE_MODE = 0o600
# Refusals cost a stranger nothing, so more than these in a second are counted instead of written.
MAX_REFUSALS_A_SECOND = 100
MAX_FIELD_CHARACTERS = 256
# Seconds between two lines of the process's log about a file that cannot be written.
COMPLAINT_S = 60.0

_log = logging.getLogger(__name__)


class AuditLog:
    """One line for each event, written at once. `write_failures` counts lines that could not be written: a full disk
    ends no service.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since 1970. Raises OSError where the file cannot be opened."""
        self.write_failures = 0
        self._path = path
        self._now = now
        # Without O_NONBLOCK a named pipe that nobody reads would hold up the process.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(path, flags, FILE_MODE)
        # A file that was there may be open to others; a terminal or a pipe is the system's.
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.fchmod(self._file, FILE_MODE)
        self._second = -1
        self._refusals = self._left_out = 0
        self._complained_at = -math.inf

    def refused(self, identity: str, peer: str, call: str, reason: str) -> None:
        """A call was refused. `identity` is the caller's name, "" where it is not known."""
        now = self._now()
        self._enter(now)
        if self._refusals < MAX_REFUSALS_A_SECOND:
            self._refusals += 1
            self._write(now, "refused", identity, peer, call, reason)
        else:
            self._left_out += 1

    def called(self, identity: str, peer: str, call: str, reason: str = "") -> None:
        """A known caller made a call that is recorded."""
        now = self._now()
        self._enter(now)
        self._write(now, "called", identity, peer, call, reason)

    def close(self) -> None:
        """Writes how many refusals were left out, if any, and closes the file. Idempotent."""
        if self._file >= 0:
            self._write_left_out(self._now())
            os.close(self._file)
            self._file = -1

    def _enter(self, now: float) -> None:
        """Begins a second, in which refusals are written again."""
        if int(now) != self._second:
            self._write_left_out(now)
            self._second, self._refusals = int(now), 0

    def _write_left_out(self, now: float) -> None:
        if self._left_out:
            self._write(now, "refused", "", "", "", f"refusals left out: {self._left_out}")
            self._left_out = 0

    def _write(
        self, now: float, event: Literal["refused", "called"], identity: str, peer: str, call: str, reason: str
    ) -> None:
        fields = {"identity": identity, "peer": peer, "call": call, "reason": reason}
        clipped = {name: text[:MAX_FIELD_CHARACTERS] for name, text in fields.items()}
        moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        # ASCII alone: control characters, other alphabets and halves of surrogate pairs are escaped.
        line = (json.dumps({"time": moment, "event": event} | clipped) + "\n").encode("ascii")
        try:
            # One write for a line: with O_APPEND lines of two processes do not mix.
            if os.write(self._file, line) < len(line):
                raise OSError("no room for a whole line")
        except OSError as error:
            self.write_failures += 1
            # A clock that was set back counts as a minute gone.
            if not 0 <= now - self._complained_at < COMPLAINT_S:
                self._complained_at = now
                _log.warning("audit log %s: %s; %d lines lost so far", self._path, error, self.write_failures)
