"""The parts of a process's start, such as importing torch or loading weights: each is logged when it begins and, with
its seconds, when it ends, so that a start of minutes is never silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagekv.common.logs import Log
from pagekv.common.port_file import add_to_port_file

log = Log(__name__)

# Least seconds between two log lines of one phase, and between two calls of a listener.
LOG_EVERY_S, TELL_EVERY_S = 5.0, 0.2


class Phase:
    """A part of the start that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        # None: progress is not measured.
        self.percent: int | None = None
        self._begun = self._logged = time.monotonic()
        self._told = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._begun

    def progress(self, done: float, total: float) -> None:
        """Reports that `done` of `total`, in any unit, is done; from any thread. Logged and told now and then."""
        if total <= 0:
            return
        now, self.percent = time.monotonic(), min(100, int(100 * done / total))
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.info(f"{self.name} ...", percent=self.percent, seconds=round(self.seconds, 1))
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            _tell(self)


# Called on the working thread: with the current phase whenever it changes, and with None when it is over.
_listeners: list[Callable[[Phase | None], None]] = []


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Logs that the work inside begins and, if it ends without an exception, how long it took."""
    current = Phase(name)
    log.info(f"{name} ...")
    _tell(current)
    try:
        yield current
        log.info(f"{name}: done", seconds=round(current.seconds, 2))
    finally:
        _tell(None)


def _tell(current: Phase | None) -> None:
    for listener in _listeners:
        listener(current)


@contextmanager
def phases_told(port_file: str) -> Iterator[None]:
    """Writes the current phase to the file of --port-file, for the process that waits for this one. Does nothing if
    `port_file` is empty.
    """

    def tell(current: Phase | None) -> None:
        facts = None if current is None else {"name": current.name, "percent": current.percent}
        add_to_port_file(port_file, phase=facts)

    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)
