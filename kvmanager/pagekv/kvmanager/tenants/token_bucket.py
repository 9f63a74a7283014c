"""A token bucket: a rate that may be exceeded for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Fills at a rate, up to the amount of `burst_s` seconds. `take` may bring it below zero, because the cost of a
    call is known only after it has begun. Then no call may begin until it is above zero again.
    """

    def __init__(self, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """At first there is no rate, and every call may begin."""
        self._burst_s = burst_s
        self._clock = clock
        self._rate: float | None = None
        self._level = 0.0
        self._at = clock()

    def set_rate(self, per_s: float | None) -> None:
        """Sets another rate; None for no limit. A level below zero stays. If there was no limit, the bucket is full."""
        self._fill()
        if self._rate is None and per_s is not None:
            self._level = per_s * self._burst_s
        self._rate = per_s
        self._fill()

    def wait_s(self) -> float:
        """Seconds until a call may begin; 0: now."""
        self._fill()
        if self._rate is None or self._level > 0:
            return 0.0
        return max(-self._level / self._rate, 1e-3)

    def take(self, amount: float) -> None:
        if self._rate is not None:
            self._fill()
            self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        if self._rate is not None:
            self._level = min(self._rate * self._burst_s, self._level + self._rate * (now - self._at))
        self._at = now
