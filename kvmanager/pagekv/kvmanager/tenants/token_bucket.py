"""A rate that may be exceeded for a moment: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Fills at a rate, up to as much as comes in `burst_s` seconds. Taking may empty it below zero, for what a call
    costs is known only when it is under way; then nothing begins until it is above zero again.
    """

    def __init__(self, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a rate at first: everything is let through."""
        self._burst_s = burst_s
        self._clock = clock
        self._rate: float | None = None
        self._level = 0.0
        self._at = clock()

    def set_rate(self, per_s: float | None) -> None:
        """Another rate, None for no limit. A debt stays; behind no limit the bucket begins full."""
        self._fill()
        if self._rate is None and per_s is not None:
            self._level = per_s * self._burst_s
        self._rate = per_s
        self._fill()

    def wait_s(self) -> float:
        """Seconds until something may be taken; 0: now."""
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
