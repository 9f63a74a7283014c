"""What left the prefix table lately, and when: the difference between "never seen" and "evicted 12 steps ago"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat

# Digests in one generation. Two are kept, so at least this many of the newest are known and at most twice as many.
GENERATION = 32_768


@dataclass(frozen=True, slots=True)
class Removal:
    """When blocks left the table, and whether everything else left with them."""

    # Steps completed by then.
    step: int
    # Seconds of the log's clock.
    at: float
    # True: the whole table was forgotten; False: the memory was needed.
    cleared: bool


class RemovalHistory:
    """Digest to its latest removal, in bounded memory; adding and finding take constant time."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        # No digest is ever dropped by itself: that would cost a second structure to know the oldest.
        self._young: dict[bytes, Removal] = {}
        self._old: dict[bytes, Removal] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, digests: Iterable[bytes], removal: Removal) -> None:
        """Remembers up to a generation of these digests."""
        self._young.update(zip(islice(digests, self._generation), repeat(removal), strict=False))
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}

    def find(self, digest: bytes) -> Removal | None:
        """The digest's latest removal that is remembered."""
        return self._young.get(digest) or self._old.get(digest)
