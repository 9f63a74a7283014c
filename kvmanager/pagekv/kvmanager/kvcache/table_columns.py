"""The prefix table at one moment, for readers that go through it block by block while steps go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Ids that are looked at together.
PIECE = 1024


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Columns by block id, whose rows mean something for published blocks only."""

    published: NDArray[np.bool_]
    # A tuple, which the garbage collector looks through once, and not in every young collection.
    digests: tuple[bytes | None, ...]
    # The block before each in its chain; -1 for the first.
    parents: NDArray[np.int32]
    # Roots of the chains, by first block.
    roots: dict[int, bytes]
    # Blocks that have a medium, or one before them, which tokens alone do not identify.
    media: set[int]
    # [num_blocks, block_size].
    tokens: NDArray[np.uint32]
    # Namespace and adapter of blocks that have one.
    names: dict[int, tuple[str, str]]

    def parents_first(self) -> Iterator[int]:
        """Every published block, after the one before it in its chain; otherwise in the order of ids."""
        written = np.zeros(len(self.published), np.bool_).data
        parents = self.parents.data
        # In pieces: a list of all ids would be made before the first block is read.
        for start in range(0, len(written), PIECE):
            for block in (np.flatnonzero(self.published[start : start + PIECE]) + start).tolist():
                chain = []
                while block >= 0 and not written[block]:
                    written[block] = True
                    chain.append(block)
                    block = parents[block]
                yield from reversed(chain)
