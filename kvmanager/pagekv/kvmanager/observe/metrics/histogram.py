"""A histogram that takes many equal values at once: prometheus-client's own takes one at a time, with a lock each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts by bucket. Used on one thread; counts never fall."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend: a bucket counts values above the bound before its own and up to its own."""
        self._bounds = list(bounds)
        # The last count is of values above every bound.
        self._counts = [0] * (len(self._bounds) + 1)
        # Sum of all values.
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus writes them; the last bound is +Inf."""
        bounds = [*(f"{float(bound)}" for bound in self._bounds), "+Inf"]
        return [*zip(bounds, accumulate(self._counts), strict=True)]
