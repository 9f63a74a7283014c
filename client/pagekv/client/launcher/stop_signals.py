"""The signals that end a stack in the foreground."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from pagekv.client.launcher.stack import Stack


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP set `asked`; the second one kills the stack. For the main thread, in `with`."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.asked = threading.Event()

    def __enter__(self) -> StopSignals:
        self._before = {signum: signal.signal(signum, self._handle) for signum in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            self._stack.kill()
        self.asked.set()
