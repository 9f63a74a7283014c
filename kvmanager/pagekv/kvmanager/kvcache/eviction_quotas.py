"""How many blocks each tenant loses when some must be evicted: whoever is most over its share loses the next one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# One number for each tenant.
Counts = NDArray[np.int64]
Weights = NDArray[np.float64]


def eviction_quotas(count: int, footprints: Counts, weights: Weights, allowed: Counts, taker: int) -> Counts:
    """How many of `count` blocks come from each tenant, at most `allowed`, which are as many together at least.

    The same as one after the other from the tenant with the largest footprint / weight, of equal ones from the `taker`
    and then from the lowest number; but in a few vector operations over the tenants. Every block that a tenant loses
    stands for a level, its footprint before that / its weight, and the highest levels go.
    """
    quotas = np.zeros(len(allowed), np.int64)
    numbers = np.flatnonzero(allowed)
    if len(numbers) <= 1:
        quotas[numbers] = count
        return quotas
    blocks, weight, most = footprints[numbers], weights[numbers], allowed[numbers]
    if count == 1:
        # A sequence goes on, as almost always.
        levels = blocks / weight
        at = int(levels.argmax())
        own = allowed[taker] and footprints[taker] / weights[taker] >= levels[at]
        quotas[taker if own else numbers[at]] = 1
        return quotas
    # Beyond these nothing can go: a few too many, for the level is not exact.
    looked_at = np.clip(np.floor(blocks - weight * _level(count, blocks, weight, most)) + 2, 0, most).astype(np.int64)
    whose = np.repeat(np.arange(len(numbers)), looked_at)
    nth = np.arange(len(whose)) - np.repeat(np.cumsum(looked_at) - looked_at, looked_at)
    levels = (blocks[whose] - nth) / weight[whose]
    rank = np.where(numbers == taker, -1, numbers)
    highest = np.lexsort((rank[whose], -levels))[:count]
    quotas[numbers] = np.bincount(whose[highest], minlength=len(numbers))
    return quotas


def _level(count: int, blocks: Counts, weight: Weights, most: Counts) -> float:
    """The level down to which tenants have given `count` blocks, were blocks divisible."""
    ends = np.concatenate([blocks / weight, (blocks - most) / weight])
    order = np.argsort(-ends, kind="stable")
    ends = ends[order]
    # Blocks given for each unit of level, between one end and the next; and in all down to each end.
    rate = np.cumsum(np.concatenate([weight, -weight])[order])
    given = np.cumsum(np.maximum(rate[:-1], 0) * (ends[:-1] - ends[1:]))
    at = min(int(np.searchsorted(given, count)), len(given) - 1)
    if rate[at] <= 0:
        return float(ends[at + 1])
    return float(ends[at + 1] + (given[at] - count) / rate[at])
