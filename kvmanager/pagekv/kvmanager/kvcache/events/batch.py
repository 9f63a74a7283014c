"""The net change of the prefix tables between two borders: what enters and leaves them, and nothing that did both.

Some blocks enter in almost every step, so what is told of them goes on as it came, in columns, and is looked at once,
when a reader takes it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple


class Tier(IntEnum):
    """Whose table: numbers as in the contract."""

    DEVICE = 1
    HOST = 2


# A digest may be in both tables.
Key = tuple[Tier, bytes]


class Removed(NamedTuple):
    """Blocks that left a table; digests are 32 bytes. Nothing in here may change."""

    tier: Tier
    digests: Sequence[bytes]


class Stored(NamedTuple):
    """Blocks of one size, at least one, that entered a table, on the device parents before their children."""

    tier: Tier
    digests: Sequence[bytes]
    # Digest of the block or chain root before each.
    parents: Sequence[bytes]
    # Token ids as uint32, one block's after the other's.
    tokens: bytes
    # On the device: their tokens and parents alone lead to them, without media.
    text: bool = True
    # On the device: the first of them begins a chain, and its parent is the chain's root. None of the others does.
    first: bool = False

    def cut(self, start: int, end: int) -> Stored:
        """Those from one place to another."""
        if start == 0 and end >= len(self.digests):
            return self
        size = len(self.tokens) // len(self.digests)
        return self._replace(
            digests=self.digests[start:end],
            parents=self.parents[start:end],
            tokens=self.tokens[size * start : size * end],
            first=self.first and start == 0,
        )

    def each(self) -> Iterator[tuple[bytes, bytes, array[int]]]:
        """Digest, parent and token ids, block by block."""
        size = len(self.tokens) // len(self.digests)
        for place, (digest, parent) in enumerate(zip(self.digests, self.parents, strict=True)):
            yield digest, parent, array("I", self.tokens[size * place : size * (place + 1)])


def join(found: Sequence[Stored]) -> Stored:
    """All of them, of which there is at least one, in one; they are alike in tier. Where some have media and others do
    not, or begin chains, `text` and `first` say nothing.
    """
    return found[0]._replace(
        digests=[*chain.from_iterable([stored.digests for stored in found])],
        parents=[*chain.from_iterable([stored.parents for stored in found])],
        tokens=b"".join([stored.tokens for stored in found]),
    )


class Diff:
    """Applied to the tables of one border it gives those of a later one: first forget everything, in both tiers, if
    `cleared`, then what was removed, then add what was stored, in order.
    """

    __slots__ = ("cleared", "removed", "size", "stored")

    def __init__(self) -> None:
        self.cleared = False
        self.removed: list[Removed] = []
        self.stored: list[Stored] = []
        # Blocks that came or went; that everything went is one more.
        self.size = 0

    def store(self, stored: Stored) -> None:
        """Blocks that were not in the table enter it."""
        self.stored.append(stored)
        self.size += len(stored.digests)

    def remove(self, removed: Removed) -> None:
        """Blocks of the table leave it."""
        self.removed.append(removed)
        self.size += len(removed.digests)

    def clear(self) -> None:
        """Everything leaves, in both tiers."""
        self.cleared = True
        self.removed, self.stored, self.size = [], [], 1

    def extend(self, later: Diff) -> None:
        """Goes on with what happened from here on."""
        if later.cleared:
            self.clear()
        self.removed += later.removed
        self.stored += later.stored
        self.size += later.size - later.cleared

    def settle(self) -> None:
        """Takes out what came and went, or went and came back: a digest stands for its tokens and everything before
        them, so that is no change.
        """
        for tier in {removed.tier for removed in self.removed}:
            gone = Counter(chain.from_iterable(removed.digests for removed in self.removed if removed.tier is tier))
            came = [stored for stored in self.stored if stored.tier is tier]
            if all(gone.keys().isdisjoint(stored.digests) for stored in came):
                continue
            # Whatever happened in between, each was in the table or not at first, and is now.
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
