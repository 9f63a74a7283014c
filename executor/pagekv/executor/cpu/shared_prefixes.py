"""Cascade attention: the leading blocks that sequences of a step share, which are read once for all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks [first, last) of these members' block tables are the same physical blocks."""

    members: list[int]
    first: int
    last: int


def shared_prefixes(tables: list[list[int]], min_saving: int) -> list[SharedPrefix]:
    """The shared prefixes worth reading once: each saves at least `min_saving` block reads.

    `tables[i]` are the leading blocks that member i sees in full. The ranges of a member cover its leading blocks from
    block 0 without a gap; blocks behind the last range are read for the member alone.
    """
    found: list[SharedPrefix] = []
    # Members that agree on blocks [0, depth); their ranges end at `first`.
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
                found.append(SharedPrefix(bucket, first, last))
                pending.append((bucket, last, last))
            else:
                pending.append((bucket, first, last))
    return found


def _common(tables: list[list[int]]) -> int:
    """How many leading blocks all tables have in common: as many as the least and the greatest of them have."""
    low, high = min(tables), max(tables)
    for index, (left, right) in enumerate(zip(low, high, strict=False)):
        if left != right:
            return index
    return min(len(low), len(high))
