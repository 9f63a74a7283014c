"""How many blocks each tenant loses to an eviction: the tenant with most for its weight loses the next block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# One number for each tenant.
Counts = NDArray[np.int64]
Weights = NDArray[np.float64]


def eviction_quotas(count: int, footprints: Counts, weights: Weights, allowed: Counts, taker: int) -> Counts:
    """How many of `count` blocks come from each tenant, at most `allowed` from each; `allowed` has at least `count` in
    all.

    The result is the same as taking one block after the other from the tenant with the largest footprint / weight;
    among equals from the `taker`, then from the lowest number. A few vector operations over the tenants compute it.
    Every block that a tenant loses has a level, the tenant's footprint before the loss / weight, and the blocks with
    the highest levels go.
    """
    quotas = np.zeros(len(allowed), np.int64)
    numbers = np.flatnonzero(allowed)
    if len(numbers) <= 1:
        quotas[numbers] = count
        return quotas
    blocks, weight, most = footprints[numbers], weights[numbers], allowed[numbers]
    if count == 1:
        # The common case: a decoding sequence needs its next block.
        levels = blocks / weight
        at = int(levels.argmax())
        own = allowed[taker] and footprints[taker] / weights[taker] >= levels[at]
        quotas[taker if own else numbers[at]] = 1
        return quotas
    # Upper bounds of what each tenant can lose; a few too many, because the level is not exact.
    looked_at = np.clip(np.floor(blocks - weight * _level(count, blocks, weight, most)) + 2, 0, most).astype(np.int64)
    whose = np.repeat(np.arange(len(numbers)), looked_at)
    nth = np.arange(len(whose)) - np.repeat(np.cumsum(looked_at) - looked_at, looked_at)
    levels = (blocks[whose] - nth) / weight[whose]
    rank = np.where(numbers == taker, -1, numbers)
    highest = np.lexsort((rank[whose], -levels))[:count]
    quotas[numbers] = np.bincount(whose[highest], minlength=len(numbers))
    return quotas


def _level(count: int, blocks: Counts, weight: Weights, most: Counts) -> float:
    """The level down to which tenants have given `count` blocks, if blocks were divisible."""
    ends = np.concatenate([blocks / weight, (blocks - most) / weight])
    order = np.argsort(-ends, kind="stable")
    ends = ends[order]
    # Blocks given per unit of level between one end and the next; and blocks given in all down to each end.
    rate = np.cumsum(np.concatenate([weight, -weight])[order])
    given = np.cumsum(np.maximum(rate[:-1], 0) * (ends[:-1] - ends[1:]))
    at = min(int(np.searchsorted(given, count)), len(given) - 1)
    if rate[at] <= 0:
        return float(ends[at + 1])
    return float(ends[at + 1] + (given[at] - count) / rate[at])
