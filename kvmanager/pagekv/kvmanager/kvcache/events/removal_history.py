"""The digests that left the device's table last, and why: an explanation tells "evicted" from "never seen" by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple

# Digests in one generation: as many as the device has blocks, within these bounds. Two generations are kept: at least
# one of the newest digests, at most two. More would be memory that a small pool takes hours to fill.
MIN_GENERATION, MAX_GENERATION = 4096, 32_768


class Removal(NamedTuple):
    """Whether a digest left the table with all others (`cleared`) or because its memory was needed, and when: after how
    many steps and at which second of the clock; or how many steps and seconds ago.
    """

    cleared: bool
    steps: int
    seconds: float


class RemovalHistory:
    """Digest to its latest removal, in bounded memory; adding and finding take constant time."""

    def __init__(self, generation: int = MAX_GENERATION) -> None:
        self._generation = generation
        # Whole generations are dropped: dropping single digests would need a second structure that knows the oldest.
        self._young: dict[bytes, Removal] = {}
        self._old: dict[bytes, Removal] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def size_for(self, num_blocks: int) -> None:
        """Makes room for the content of a device's pool. Nothing is forgotten by it at once."""
        self._generation = min(max(num_blocks, MIN_GENERATION), MAX_GENERATION)

    def add(self, digests: Iterable[bytes], removal: Removal) -> None:
        """Remembers up to a generation of these digests."""
        self._young.update(zip(islice(digests, self._generation), repeat(removal), strict=False))
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}

    def find(self, digest: bytes) -> Removal | None:
        return self._young.get(digest) or self._old.get(digest)


@dataclass(frozen=True, slots=True)
class RemovalNote:
    """A removal that the history gets to know by and by."""

    history: RemovalHistory
    removal: Removal

    def __call__(self, digests: Sequence[bytes]) -> None:
        self.history.add(digests, self.removal)
