"""Digests by block and blocks by digest, including digests of blocks that have just left the prefix table.

A long prompt can evict as many blocks in one step as it has itself. Clearing a digest takes a third of a microsecond,
most of it waiting for memory, so clearing 62,500 at once would delay everything else by tens of milliseconds. Such
blocks are retired instead, in a few vector operations: lookups no longer find them. Their digests are cleared later, a
few in every step, or when the block or the digest enters the table again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.retired_blocks import Blocks, Note, RetiredBlocks

# Retired blocks whose digests are cleared in every step.
SWEPT = 256


class DigestMap:
    """The digests of the blocks of one pool. Arrays of block ids are int32."""

    def __init__(self, num_blocks: int) -> None:
        # Both include retired blocks. The prefix table changes them, after `make_way`.
        self.block_of: dict[bytes, int] = {}
        self.column: list[bytes | None] = [None] * num_blocks
        self.retired = RetiredBlocks(num_blocks)

    def __len__(self) -> int:
        return len(self.block_of) - self.retired.count

    def lookup(self, digest: bytes) -> int | None:
        block = self.block_of.get(digest)
        return None if block is None or block in self.retired else block

    def leading(self, blocks: list[int]) -> list[int]:
        """The blocks before the first retired one."""
        gone = self.retired.marked[blocks]
        return blocks[: int(gone.argmax())] if gone.any() else blocks

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """The digests of blocks that have one, retired or not."""
        column = self.column
        return [column[block] for block in blocks]  # type: ignore[misc]  # only other blocks have None

    def newest(self) -> Iterator[bytes]:
        """Every digest, the latest to enter first."""
        if not self.retired.count:
            return reversed(self.block_of)
        return (digest for digest, block in reversed(self.block_of.items()) if block not in self.retired)

    # -- retired blocks

    def note(self, digest: bytes) -> Note | None:
        block = self.block_of.get(digest)
        return self.retired.note(block) if block is not None and block in self.retired else None

    def make_way(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Clears retired entries of these blocks and digests, which are about to enter."""
        holders = (block for digest in digests if (block := self.block_of.get(digest)) is not None)
        self._clear(np.array(list(dict.fromkeys([*blocks, *holders])), np.int32))

    def sweep(self) -> None:
        """Clears some retired entries; to be called in every step."""
        if self.retired.count:
            self._clear(self.retired.oldest(SWEPT))

    def settle(self) -> None:
        while self.retired.count:
            self.sweep()

    def _clear(self, blocks: Blocks) -> None:
        for note, ids in self.retired.take(blocks):
            digests = self.digests(ids)
            for block, digest in zip(ids, digests, strict=True):
                if self.block_of.pop(digest, None) != block:
                    raise InvariantError(f"retired block {block} holds a digest that is mapped elsewhere")
                self.column[block] = None
            note(digests)
