"""An outage of the connection, and the pauses before each attempt to reconnect. No I/O: the callers do the waiting."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from pagekv.client.errors import PageKVError

# Without this handler, and without logging set up, Python would write warnings to the standard error of the program.
logging.getLogger("pagekv.client").addHandler(logging.NullHandler())

FIRST_PAUSE_S = 0.1
# Longest pause if no server answers, when an attempt costs nobody anything; and if a server refuses, which is the delay
# that servers usually ask for.
LONGEST_PAUSE_UNANSWERED_S = 0.5
LONGEST_PAUSE_S = 1.0


class Outage:
    """States: none ⇄ under way, from a call of `pause_s` to `end`."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], log: logging.Logger) -> None:
        """An outage lasts `timeout_s` at most; with 0 nothing is tried again. `log` gets a warning when an outage
        begins.
        """
        self.timeout_s = timeout_s
        self._clock = clock
        self._log = log
        self._began_at: float | None = None
        self._next_s = FIRST_PAUSE_S

    @property
    def under_way(self) -> bool:
        return self._began_at is not None

    def end(self) -> None:
        """The server has answered. Idempotent."""
        self._began_at, self._next_s = None, FIRST_PAUSE_S

    def pause_s(self, error: PageKVError, least_s: float = 0.0) -> float | None:
        """Seconds to wait after this error, `least_s` or more while there is time; None when the time is up."""
        now = self._clock()
        if self._began_at is None:
            self._began_at = now
            if self.timeout_s > 0:
                self._log.warning("connection lost, trying again for up to %g s", self.timeout_s)
        left = self._began_at + self.timeout_s - now
        if left <= 0:
            return None
        # Half of the pause is random, so that the clients of a restarted server do not come all at once.
        pause = self._next_s * (0.5 + random.random() / 2)
        longest = LONGEST_PAUSE_UNANSWERED_S if isinstance(error, ConnectionError) else LONGEST_PAUSE_S
        self._next_s = min(2 * self._next_s, longest)
        return min(max(pause, least_s), left)


class Pauses:
    """The pauses of a connection under way, which its closing ends. For any thread, as far as the events are.

    States: open → closed.
    """

    def __init__(self) -> None:
        self.closed = False
        # Set to end a pause: events of threading or of asyncio.
        self._events: set[Any] = set()

    def begin(self, event: Any) -> None:
        """A pause begins, which the event ends."""
        self._events.add(event)
        # Afterwards: a `close` that has not seen the event is seen here.
        if self.closed:
            event.set()

    def end(self, event: Any) -> None:
        self._events.discard(event)

    def close(self) -> None:
        """Ends the pauses, and those that begin later. Idempotent."""
        self.closed = True
        for event in tuple(self._events):
            event.set()
