"""The digests that left the device's table last, and why: explanations can tell "evicted" from "never seen"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple

# Digests in one generation: as many as the device has blocks, within these bounds. Two generations are kept, so between
# one and two generations of the newest digests. A small pool would take hours to fill more.
MIN_GENERATION, MAX_GENERATION = 4096, 32_768


class Removal(NamedTuple):
    """Whether a digest left the table with all others (`cleared`) or was evicted, and when: `steps` and `seconds` are
    the number of the step and the time of the clock or, in answers, how long ago that was.
    """

    cleared: bool
    steps: int
    seconds: float


class RemovalHistory:
    """Digest to its latest removal, in bounded memory; adding and finding take constant time."""

    def __init__(self, generation: int = MAX_GENERATION) -> None:
        self._generation = generation
        # Whole generations are dropped: dropping single digests would need another structure that knows the oldest.
        self._young: dict[bytes, Removal] = {}
        self._old: dict[bytes, Removal] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def size_for(self, num_blocks: int) -> None:
        """Makes room for the content of a device's pool. Forgets nothing at once."""
        self._generation = min(max(num_blocks, MIN_GENERATION), MAX_GENERATION)

    def add(self, digests: Iterable[bytes], removal: Removal) -> None:
        """Remembers these digests, at most one generation of them."""
        self._young.update(zip(islice(digests, self._generation), repeat(removal), strict=False))
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}

    def find(self, digest: bytes) -> Removal | None:
        return self._young.get(digest) or self._old.get(digest)


@dataclass(frozen=True, slots=True)
class RemovalNote:
    """A removal whose digests are added to the history when they become known."""

    history: RemovalHistory
    removal: Removal

    def __call__(self, digests: Sequence[bytes]) -> None:
        self.history.add(digests, self.removal)
