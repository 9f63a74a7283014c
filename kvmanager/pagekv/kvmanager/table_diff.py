"""The net change of the prefix tables between two borders: what enters and leaves them, and nothing that did both."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Tier(IntEnum):
    """Whose table: numbers as in the contract."""

    DEVICE = 1
    HOST = 2


# A digest may be in both tables.
Key = tuple[Tier, bytes]


class TableDiff(Generic[Entry]):
    """Applied to the tables of one border it gives those of a later one: first forget everything, in both tiers, if
    `cleared`, then go through `changes` in order.

    A digest stands for its tokens and everything before them, so leaving and coming back is no change.
    """

    __slots__ = ("changes", "cleared")

    def __init__(self) -> None:
        self.cleared = False
        # What entered, or None for what left.
        self.changes: dict[Key, Entry | None] = {}

    def __bool__(self) -> bool:
        return self.cleared or bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def store(self, key: Key, entry: Entry) -> None:
        """The digest, not in the table, enters it."""
        if key in self.changes:
            del self.changes[key]
        else:
            self.changes[key] = entry

    def remove(self, keys: Iterable[Key]) -> None:
        """Digests of a table leave it."""
        for key in keys:
            if key in self.changes:
                del self.changes[key]
            else:
                self.changes[key] = None

    def clear(self) -> None:
        """Everything leaves, in both tiers."""
        self.cleared = True
        self.changes = {}

    def extend(self, later: TableDiff[Entry]) -> None:
        """Makes this the change up to where `later`, which begins where this one ends, leads."""
        if later.cleared:
            self.clear()
        for key, entry in later.changes.items():
            if entry is None:
                self.remove((key,))
            else:
                self.store(key, entry)
