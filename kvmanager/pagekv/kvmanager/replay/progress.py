"""One status line on standard error, only when that is a terminal."""

from __future__ import annotations

import os
import time
from typing import TextIO

_WIDTH = 28
_REDRAW_S = 0.1


class Progress:
    """A bar over all rows of a report."""

    def __init__(self, stream: TextIO, rows: int, records: int) -> None:
        self._stream = stream
        self._shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._rows, self._records = rows, records
        self._drawn_at = 0.0

    def show(self, row: int, label: str, done: int) -> None:
        """Row `row`, from 0, has come to record `done`."""
        now = time.monotonic()
        if not self._shown or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        filled = _WIDTH * (row * self._records + done) // (self._rows * self._records)
        bar = "█" * filled + "·" * (_WIDTH - filled)
        self._stream.write(f"\r\x1b[K[{bar}] {label}: {done:,} of {self._records:,} requests")
        self._stream.flush()

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown and self._drawn_at:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
