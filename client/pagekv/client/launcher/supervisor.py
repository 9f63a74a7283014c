"""A stack in the foreground: started, shown once it is ready, watched until a signal, stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from pagekv.client.launcher.stack import Stack

_STEP_S = 0.2


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


def supervise(
    stack: Stack,
    wait_ready: Callable[[threading.Event], bool],
    on_ready: Callable[[], None],
    on_death: Callable[[str], None],
    on_stop: Callable[[], None],
) -> None:
    """Runs the stack until a signal asks for its end. Raises StackError when nothing is left that serves.

    `wait_ready` gets the event that a signal sets, and returns False when it was set first; `on_death` gets the report
    of a process without which the others go on.
    """
    with StopSignals(stack) as signals, stack:
        stack.start()
        if wait_ready(signals.asked):
            on_ready()
            while not signals.asked.wait(_STEP_S):
                for report in stack.new_deaths():
                    on_death(report)
        on_stop()
