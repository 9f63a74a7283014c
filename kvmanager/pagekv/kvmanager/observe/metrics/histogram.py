"""A histogram that takes many equal values at once: prometheus-client's own takes one at a time, with a lock each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Histogram:
    """Counts by bucket. Used on one thread; what is counted is never taken back."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend: a bucket counts what is above the bound before its own and up to its own."""
        self._bounds = list(bounds)
        self._edges = np.array(self._bounds)
        # One more, for what is above every bound; of single values, and of those that came many at once.
        self._counts = [0] * (len(self._bounds) + 1)
        self._many = np.zeros(len(self._counts), np.int64)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Adds each of the values."""
        self._many += np.bincount(np.searchsorted(self._edges, values), minlength=len(self._many))
        self._sum += float(values.sum())

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._sum

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self._counts) + int(self._many.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus writes them; the last bound is +Inf."""
        cumulative = np.cumsum(self._counts + self._many).tolist()
        return list(zip([*(f"{float(bound)}" for bound in self._bounds), "+Inf"], cumulative, strict=True))
