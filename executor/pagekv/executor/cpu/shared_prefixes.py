"""Which sequences of a step share leading blocks, so that those are read once for all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Blocks [first, last) of these members' block tables are the same physical blocks."""

    members: list[int]
    first: int
    last: int


def shared_runs(tables: list[list[int]], min_saving: int) -> list[SharedRun]:
    """The runs worth sharing: reading the run once saves at least `min_saving` block reads.

    `tables[i]` are the leading blocks that member i sees in full. The runs of a member follow one another from block 0
    without a gap; what is behind the last belongs to the member alone.
    """
    runs: list[SharedRun] = []
    # Members that agree on blocks [0, depth); their runs reach up to `first`.
    pending = [(list(range(len(tables))), 0, 0)]
    while pending:
        members, first, depth = pending.pop()
        buckets: dict[int, list[int]] = defaultdict(list)
        for member in members:
            if len(tables[member]) > depth:
                buckets[tables[member][depth]].append(member)
        for bucket in buckets.values():
            if len(bucket) < 2:
                continue
            last = _common([tables[member] for member in bucket])
            if (len(bucket) - 1) * (last - first) >= min_saving:
                runs.append(SharedRun(bucket, first, last))
                pending.append((bucket, last, last))
            else:
                pending.append((bucket, first, last))
    return runs


def _common(tables: list[list[int]]) -> int:
    """How many leading blocks all tables have in common: as many as the least and the greatest of them have."""
    low, high = min(tables), max(tables)
    for index, (left, right) in enumerate(zip(low, high, strict=False)):
        if left != right:
            return index
    return min(len(low), len(high))
