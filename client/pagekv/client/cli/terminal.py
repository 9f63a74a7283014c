"""Output for people and for scripts: colours, one status line, tables. Plain text unless the stream is a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any, TextIO

_BAR_WIDTH = 28
# Least width of a column of text in characters, however narrow the terminal.
_NARROWEST = 20
# Most redraws of the status line per second.
_REDRAWS_PER_S = 12


def pagekv_command() -> str:
    """`pagekv` as it can be typed in this shell: with its path if it is in an environment that is not active."""
    started = os.path.relpath(sys.argv[0])
    if shutil.which("pagekv") or os.path.basename(started) != "pagekv":
        return "pagekv"
    return started


class Terminal:
    """Standard output for results, standard error for everything else. NO_COLOR and TERM=dumb are honoured."""

    def __init__(self) -> None:
        self.out, self.err = sys.stdout, sys.stderr
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.out_is_terminal = self.out.isatty()
        self.err_is_terminal = self.err.isatty()
        self._out_styled = self.out_is_terminal and not plain
        self._err_styled = self.err_is_terminal and not plain
        self._status = ""
        self._drawn_at = 0.0
        # Whether standard output is in the middle of a line.
        self._in_line = False

    @property
    def out_columns(self) -> int | None:
        """Width of standard output in characters; None if it is not a terminal, and the lines are for programs."""
        return _columns(self.out) if self.out_is_terminal else None

    def write(self, text: str) -> None:
        """Result text as it arrives, without a line end."""
        self.clear()
        self.out.write(text)
        self.out.flush()
        if text:
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line that `write` has begun, so that an error or the shell's prompt begins a new line."""
        if self._in_line:
            self.print()

    def print(self, text: str = "") -> None:
        """A line of the result."""
        self.write(f"{text}\n")

    def json(self, value: Any) -> None:
        """One JSON value on a line of standard output; dataclasses become objects, times ISO 8601."""
        self.print(json.dumps(value, default=lambda v: v.isoformat() if isinstance(v, datetime) else asdict(v)))

    def note(self, text: str) -> None:
        """Lines for a person, dimmed, on standard error."""
        self._write_error(self.dim(_printable_lines(text)))

    def last_note(self, text: str) -> None:
        """A note of a command that was asked to end. It is lost if the terminal or the pipe is closed."""
        with suppress(OSError):
            self.note(text)
        for stream in (self.out, self.err):
            try:
                stream.flush()
            except OSError:
                # Otherwise Python would try again at exit, and end with another status.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def error(self, text: str) -> None:
        """Lines that say what went wrong, on standard error."""
        self._write_error(_printable_lines(text))

    def _write_error(self, text: str) -> None:
        self.clear()
        self.end_line()
        self.err.write(f"{text}\n")
        self.err.flush()

    def aside(self, text: str) -> None:
        """A line for a person, dimmed, on standard error, in the middle of a result that continues: nothing is written
        to standard output, not even a line end.
        """
        self.clear()
        begun = self._in_line and self.out_is_terminal and self.err_is_terminal
        self.err.write(("\n" if begun else "") + f"{self.dim(_printable_lines(text))}\n")
        self.err.flush()

    def dim(self, text: str) -> str:
        """The text dimmed, for standard error."""
        return f"\x1b[2m{text}\x1b[0m" if self._err_styled and text else text

    def bold(self, text: str) -> str:
        """The text in bold, for standard output."""
        return f"\x1b[1m{text}\x1b[0m" if self._out_styled and text else text

    def status(self, text: str) -> None:
        """Replaces the status line; does nothing unless standard error is a terminal."""
        now = time.monotonic()
        if not self._err_styled or text == self._status or (self._status and now - self._drawn_at < 1 / _REDRAWS_PER_S):
            return
        columns = _columns(self.err)
        self._status, self._drawn_at = text, now
        self.err.write(f"\r\x1b[K{self.dim(text[: columns - 1])}")
        self.err.flush()

    def progress(self, done: int, total: int, text: str) -> None:
        """Replaces the status line by a progress bar."""
        filled = _BAR_WIDTH * done // max(total, 1)
        self.status(f"[{'█' * filled}{'·' * (_BAR_WIDTH - filled)}] {done}/{total} {text}")

    def clear(self) -> None:
        """Removes the status line."""
        if self._status:
            self._status = ""
            self.err.write("\r\x1b[K")
            self.err.flush()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def printable(text: str) -> str:
    """The text with escapes, such as \\x1b, for all that is not printable: servers and their other callers must neither
    control this terminal nor begin lines on it.
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def table(
    rows: Sequence[Sequence[object]],
    header: Sequence[str] = (),
    *,
    indent: str = "",
    width: int | None = None,
    right: bool = False,
) -> str:
    """A table with columns two spaces apart. Columns of numbers, or all columns, are aligned to the right. Rows are
    equally long; what is not printable in them is escaped. If a row would be wider than `width`, its last column is
    broken into lines, unless that would leave it too narrow to read.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if header:
        cells.insert(0, list(header))
    if not cells:
        return ""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    numeric = [right or all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(widths))]
    lines = []
    if width is not None and (room := width - len(indent) - sum(widths[:-1]) - 2 * len(widths[:-1])) >= _NARROWEST:
        cells = [line for row in cells for line in _broken(row, room)]
        widths[-1] = min(widths[-1], room)
    for row in cells:
        padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True)]
        lines.append(indent + "  ".join(padded).rstrip())
    return "\n".join(lines)


def _broken(row: Sequence[str], room: int) -> list[list[str]]:
    """The row as several rows, in each of which the last cell has at most `room` characters."""
    first, *more = textwrap.wrap(row[-1], room) or [""]
    return [[*row[:-1], first], *([*[""] * (len(row) - 1), line] for line in more)]


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as 1 pin or 3 pins."""
    return f"{number} {noun}{'s' * (number != 1)}"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds as text, such as 3.2 ms or 120 ms; a dash for None."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
