"""The net change of a prefix table between two borders: what enters and leaves it, and nothing that did both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class TableDiff(Generic[Entry]):
    """Applied to the table of one border it gives that of a later one: first forget everything if `cleared`, then go
    through `changes` in order.

    A digest stands for its tokens and everything before them, so leaving and coming back is no change.
    """

    __slots__ = ("changes", "cleared")

    def __init__(self) -> None:
        self.cleared = False
        # By digest: what entered, or None for what left.
        self.changes: dict[bytes, Entry | None] = {}

    def __bool__(self) -> bool:
        return self.cleared or bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def store(self, digest: bytes, entry: Entry) -> None:
        """The digest, not in the table, enters it."""
        if digest in self.changes:
            del self.changes[digest]
        else:
            self.changes[digest] = entry

    def remove(self, digests: Iterable[bytes]) -> None:
        """Digests of the table leave it."""
        for digest in digests:
            if digest in self.changes:
                del self.changes[digest]
            else:
                self.changes[digest] = None

    def clear(self) -> None:
        """Everything leaves."""
        self.cleared = True
        self.changes = {}

    def extend(self, later: TableDiff[Entry]) -> None:
        """Makes this the change up to where `later`, which begins where this one ends, leads."""
        if later.cleared:
            self.clear()
        for digest, entry in later.changes.items():
            if entry is None:
                self.remove((digest,))
            else:
                self.store(digest, entry)
