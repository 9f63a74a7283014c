"""Single key presses from the terminal, while something else is drawn on it."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty

# Python may miss a signal that arrives between its check for signals and the wait in the kernel. Such a signal is
# handled after at most so many seconds.
_LONGEST_WAIT_S = 0.5


class Keys:
    """In `with`, keys arrive as they are pressed and are not shown; Ctrl-C still interrupts. Leaving `with` restores
    the terminal. If standard input is not a terminal there are no keys, and nothing is changed.
    """

    def __init__(self) -> None:
        # None: no keys come.
        self._input: int | None = None

    def __enter__(self) -> Keys:
        if sys.stdin is not None and sys.stdin.isatty():
            self._input = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        return self

    def __exit__(self, *_: object) -> None:
        if self._input is not None:
            # Drops keys typed meanwhile, which are not meant for the next reader.
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._before)

    @property
    def are_read(self) -> bool:
        """Whether keys can arrive."""
        return self._input is not None

    def wait_for(self, keys: bytes, seconds: float) -> bool:
        """Whether one of these keys was pressed within so many seconds; other keys are dropped."""
        source = self._input
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if source is None:
                pause(left)
                break
            # select() takes no descriptor above 1023.
            poll = select.poll()
            poll.register(source, select.POLLIN)
            if not poll.poll(1000 * min(left, _LONGEST_WAIT_S)):
                continue
            typed = os.read(source, 1024)
            if any(key in keys for key in typed):
                return True
            if not typed:
                # The terminal is gone: poll would report its end again and again.
                source = None
        return False


def pause(seconds: float) -> None:
    """Sleeps in short pieces, so that a signal just before one of them is seen soon."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _LONGEST_WAIT_S))
