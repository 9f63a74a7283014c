"""Twins: held blocks outside the prefix table with the same content as a held block in it.

Blocks are never merged: if two held blocks have the same content, one has the entry and the other is its private twin.
When nobody holds the first any more, a twin takes over the entry, as vLLM returns any block of a hash. So the chain
that a sequence published stays in the table while the sequence holds it, and the next block that it publishes finds its
parent there.
"""

from __future__ import annotations


class Twins:
    """Twins by block, and by the digest of their entry in the order in which they came."""

    def __init__(self) -> None:
        self._digest_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def digest(self, block: int) -> bytes | None:
        return self._digest_of.get(block)

    def add(self, block: int, digest: bytes) -> None:
        """Makes the block a twin of the entry with this digest, if it is not one already."""
        if block not in self._digest_of:
            self._digest_of[block] = digest
            self._blocks_of.setdefault(digest, []).append(block)

    def remove(self, block: int) -> None:
        """Removes the block, if it is a twin."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            self._blocks_of[digest].remove(block)
            if not self._blocks_of[digest]:
                del self._blocks_of[digest]

    def pop_oldest(self, digest: bytes) -> int | None:
        """Removes and returns the first twin of the entry with this digest; None if it has none."""
        twins = self._blocks_of.get(digest)
        if twins is None:
            return None
        self.remove(oldest := twins[0])
        return oldest

    def pop_all(self, digest: bytes) -> None:
        """Removes all twins of the entry with this digest, which leaves the table."""
        for block in self._blocks_of.pop(digest, ()):
            del self._digest_of[block]

    def clear(self) -> None:
        self._digest_of.clear()
        self._blocks_of.clear()
