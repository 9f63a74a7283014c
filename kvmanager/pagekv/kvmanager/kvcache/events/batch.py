"""The net change of the prefix tables between two step boundaries, without blocks that entered and left again.

Blocks enter in almost every step, so changes are passed on in columns as they came. Their net change is computed once,
when a reader takes them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple


class Tier(IntEnum):
    """The pool that a table belongs to; numbers as in the contract."""

    DEVICE = 1
    HOST = 2


OptionalNames = Sequence[tuple[str, str] | None] | None


class Removed(NamedTuple):
    """Blocks that left a table; digests are 32 bytes. Not to be changed."""

    tier: Tier
    digests: Sequence[bytes]


class Stored(NamedTuple):
    """Blocks of one size, at least one, that entered a table. On the device, parents come before their children."""

    tier: Tier
    digests: Sequence[bytes]
    # Digest of the block or chain root before each.
    parents: Sequence[bytes]
    # Token ids as uint32, block by block.
    tokens: bytes
    # On the device: no block has media, so tokens and parents alone identify the blocks.
    text: bool = True
    # The first of the blocks, and no other, begins a chain; its parent is the chain's root.
    first: bool = False
    # Namespace and adapter of each block, None if it has neither; None instead of a list if no block has any.
    names: OptionalNames = None

    def cut(self, start: int, end: int) -> Stored:
        """The blocks at positions [start, end)."""
        if start == 0 and end >= len(self.digests):
            return self
        size = len(self.tokens) // len(self.digests)
        return self._replace(
            digests=self.digests[start:end],
            parents=self.parents[start:end],
            tokens=self.tokens[size * start : size * end],
            first=self.first and start == 0,
            names=self.names[start:end] if self.names is not None else None,
        )

    def each(self) -> Iterator[tuple[bytes, bytes, array[int]]]:
        """Digest, parent and token ids, block by block."""
        size = len(self.tokens) // len(self.digests)
        for place, (digest, parent) in enumerate(zip(self.digests, self.parents, strict=True)):
            yield digest, parent, array("I", self.tokens[size * place : size * (place + 1)])


def join(found: Sequence[Stored]) -> Stored:
    """Joins batches of one tier, at least one. `text` and `first` mean nothing if the batches differ in them."""
    return found[0]._replace(
        digests=[*chain.from_iterable([stored.digests for stored in found])],
        parents=[*chain.from_iterable([stored.parents for stored in found])],
        tokens=b"".join([stored.tokens for stored in found]),
        names=_join_names(found),
    )


def _join_names(found: Sequence[Stored]) -> OptionalNames:
    if all(stored.names is None for stored in found):
        return None
    return [name for stored in found for name in stored.names or [None] * len(stored.digests)]


class Diff:
    """Leads from one step boundary to a later one: `cleared` empties both tiers, then `removed`, then `stored`."""

    __slots__ = ("cleared", "removed", "size", "stored")

    def __init__(self) -> None:
        self.cleared = False
        self.removed: list[Removed] = []
        self.stored: list[Stored] = []
        # Blocks that entered or left; `cleared` counts as one more.
        self.size = 0

    def store(self, stored: Stored) -> None:
        """Adds blocks that were not in the table."""
        self.stored.append(stored)
        self.size += len(stored.digests)

    def remove(self, removed: Removed) -> None:
        self.removed.append(removed)
        self.size += len(removed.digests)

    def clear(self) -> None:
        self.cleared = True
        self.removed, self.stored, self.size = [], [], 1

    def extend(self, later: Diff) -> None:
        """Appends the changes between this boundary and a later one."""
        if later.cleared:
            self.clear()
        self.removed += later.removed
        self.stored += later.stored
        self.size += later.size - later.cleared

    def settle(self) -> None:
        """Drops blocks that left and came back, or the reverse, because a digest always stands for the same tokens."""
        for tier in {removed.tier for removed in self.removed}:
            gone = Counter(chain.from_iterable(removed.digests for removed in self.removed if removed.tier is tier))
            came = [stored for stored in self.stored if stored.tier is tier]
            if all(gone.keys().isdisjoint(stored.digests) for stored in came):
                continue
            # Insertions and removals of one digest alternate, so their difference tells the net change.
            here = Counter(chain.from_iterable(stored.digests for stored in came))
            left, entered = gone - here, here - gone
            self.removed = [removed for removed in self.removed if removed.tier is not tier]
            if left:
                self.removed.append(Removed(tier, list(left)))
            latest: list[Stored] = []
            for stored in reversed(came):
                for place in reversed(range(len(stored.digests))):
                    if entered.pop(stored.digests[place], 0):
                        latest.append(stored.cut(place, place + 1))
            self.stored = [stored for stored in self.stored if stored.tier is not tier] + latest[::-1]
            self.size = self.cleared + sum(len(removed.digests) for removed in self.removed)
            self.size += sum(len(stored.digests) for stored in self.stored)
