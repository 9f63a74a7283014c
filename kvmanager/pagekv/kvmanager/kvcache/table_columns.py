"""The prefix table at one moment, for readers that walk through it block by block while steps go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Block ids that are examined together.
PIECE = 1024


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Columns by block id; only the rows of published blocks are valid."""

    published: NDArray[np.bool_]
    # A tuple, not a list: the garbage collector scans it once instead of in every young collection.
    digests: tuple[bytes | None, ...]
    # The block before each block in its chain; -1 for the first.
    parents: NDArray[np.int32]
    # Roots of the chains, by first block.
    roots: dict[int, bytes]
    # Blocks from the first medium of their chain on, which tokens alone do not identify.
    media: set[int]
    # [num_blocks, block_size].
    tokens: NDArray[np.uint32]
    # Namespace and adapter of blocks that have any.
    names: dict[int, tuple[str, str]]

    def parents_first(self) -> Iterator[int]:
        """Yields every published block after its parent; otherwise in the order of ids."""
        written = np.zeros(len(self.published), np.bool_).data
        parents = self.parents.data
        # In pieces: otherwise a list of all ids would be made before the first block is read.
        for start in range(0, len(written), PIECE):
            for block in (np.flatnonzero(self.published[start : start + PIECE]) + start).tolist():
                chain = []
                while block >= 0 and not written[block]:
                    written[block] = True
                    chain.append(block)
                    block = parents[block]
                yield from reversed(chain)
