"""Time that passes when the test says so."""

from __future__ import annotations


class Clock:
    """Seconds; called, it tells the time."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
