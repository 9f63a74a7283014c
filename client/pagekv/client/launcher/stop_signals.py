"""Signals that end a command and the processes that it has started."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Self

from pagekv.client.launcher.stack import Stack


class StopSignals:
    """SIGINT, SIGTERM and, unless it is ignored (`nohup`), SIGHUP ask for the end; a second signal kills the stack. For
    the main thread, in `with`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._asked = False
        # A handler interrupts the waiting thread. An Event would deadlock if that thread holds the Event's lock at this
        # moment.
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> Self:
        signals = (signal.SIGINT, *end_signals())
        self._before = {signum: signal.signal(signum, self._handle) for signum in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def wait(self, seconds: float) -> bool:
        """Whether a signal has asked for the end. Returns at once if so, else after at most so many seconds."""
        if not self._asked:
            with suppress(Empty):
                self._wakeups.get(timeout=seconds)
        return self._asked

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            self._stack.kill()
        self._asked = True
        self._wakeups.put(None)


def end_signals() -> list[signal.Signals]:
    """Signals besides SIGINT that end a command: SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    return [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) is not signal.SIG_IGN]
