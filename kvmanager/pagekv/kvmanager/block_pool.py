"""The device pool and its prefix table: who holds which block, what it holds, and what is evicted next.

States of a block (a column of parallel arrays, not an object; DESIGN 5, CHECKLIST D, F, G):

    free      ref_count 0, no digest      in the free queue
    cached    ref_count 0, digest         in the free queue: can be hit, or evicted from the head
    active    ref_count > 0, no digest    private to its holder, who may write to it
    shared    ref_count > 0, digest       published: read by any number of sequences, written by nobody again

Moves: `allocate` free|cached → active (evicting), `publish` active → shared, `touch` +1 and out of the free queue,
`free` -1 and, at 0, to the tail of the free queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagekv.kvmanager.block_hash import TOKEN_BYTES
from pagekv.kvmanager.free_queue import FreeQueue


class InvariantError(RuntimeError):
    """The manager's own state is inconsistent: a bug, reported with the numbers."""


class BlockPool:
    """Fixed pool of `num_blocks` blocks of `block_size` tokens. Nothing in here grows with requests."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._digest: list[bytes | None] = [None] * num_blocks
        self._parent: list[bytes | None] = [None] * num_blocks
        # Token ids of published blocks, for the comparison on every hit: block b owns [b * stride, (b + 1) * stride).
        self._tokens = bytearray(num_blocks * self._stride)
        self._free = FreeQueue(num_blocks)
        self._table: dict[bytes, int] = {}
        self._num_cached_free = 0
        self.evictions = 0
        self.hash_alarms = 0

    # -- gauges

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Of the free blocks, those that can still be hit."""
        return self._num_cached_free

    @property
    def num_active(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - len(self._free)

    @property
    def num_published(self) -> int:
        """Entries of the prefix table."""
        return len(self._table)

    def ref_count(self, block: int) -> int:
        """Sequences that hold the block."""
        return self._ref_count[block]

    def digest(self, block: int) -> bytes | None:
        """The block's digest if it is in the prefix table."""
        return self._digest[block]

    def parent(self, block: int) -> bytes | None:
        """Digest of the block before it in its chain, if it is in the prefix table."""
        return self._parent[block]

    # -- prefix table

    def match(self, digests: Sequence[bytes], tokens: bytes, max_blocks: int) -> list[int]:
        """Longest leading run of cached blocks, at most `max_blocks`; changes nothing but the alarm counter.

        `tokens` are the ids behind `digests` (block i is bytes [i * stride, (i + 1) * stride)). A digest that hits a
        block with other token ids is a miss and an alarm: a hash collision must not become somebody else's text.
        """
        blocks: list[int] = []
        stride, table, held = self._stride, self._table, self._tokens
        for index, digest in enumerate(digests[:max_blocks]):
            block = table.get(digest)
            if block is None:
                break
            if held[block * stride : (block + 1) * stride] != tokens[index * stride : (index + 1) * stride]:
                self.hash_alarms += 1
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes, parent: bytes, tokens: bytes) -> None:
        """Enters a full, held block into the prefix table.

        Blocks are never merged, so block tables are append-only: when the digest is there already, the block in the
        table stays and this one remains private.
        """
        if digest in self._table or self._digest[block] is not None:
            return
        if self._ref_count[block] == 0:
            raise InvariantError(f"publish of block {block}, which nobody holds")
        if len(tokens) != self._stride:
            raise InvariantError(f"publish of block {block} with {len(tokens)} token bytes, not {self._stride}")
        self._table[digest] = block
        self._digest[block] = digest
        self._parent[block] = parent
        self._tokens[block * self._stride : (block + 1) * self._stride] = tokens

    def clear_prefix_table(self) -> int:
        """Forgets every cached block; returns how many. Held blocks stay held and become private."""
        removed = len(self._table)
        for block in self._table.values():
            self._digest[block] = self._parent[block] = None
        self._table.clear()
        self._num_cached_free = 0
        return removed

    # -- holding

    def touch(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each block; cached blocks leave the free queue, so nobody can evict them."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._free.remove(block)
                if self._digest[block] is not None:
                    self._num_cached_free -= 1
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks from the head of the free queue, evicting cached ones; None, and nothing taken, when
        there are not so many."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop_head()
            if self._digest[block] is not None:
                self._evict(block)
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self, block: int) -> None:
        digest = self._digest[block]
        if digest is None or self._table.pop(digest, None) != block:
            raise InvariantError(f"block {block} holds a digest that the prefix table maps elsewhere")
        self._digest[block] = self._parent[block] = None
        self._num_cached_free -= 1
        self.evictions += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one holder off each block of a sequence's table, last block first: on equal age the deepest block is
        evicted first, so a chain never has a hole before its tail (CHECKLIST G4, G5, Z16)."""
        for block in reversed(blocks):
            count = self._ref_count[block] - 1
            if count < 0:
                raise InvariantError(f"free of block {block}, which nobody holds")
            self._ref_count[block] = count
            if count == 0:
                self._free.append(block)
                if self._digest[block] is not None:
                    self._num_cached_free += 1

    # -- proof

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Recomputes every counter from scratch against the block tables that hold blocks; raises InvariantError."""
        expected = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise InvariantError(f"a block table names a block twice: {list(table)}")
            for block in table:
                expected[block] += 1
        for block, count in enumerate(expected):
            if count != self._ref_count[block]:
                raise InvariantError(f"block {block}: ref_count {self._ref_count[block]}, held by {count} tables")
            if (count == 0) != (block in self._free):
                raise InvariantError(f"block {block}: ref_count {count}, in the free queue: {block in self._free}")
        if len(list(self._free)) != len(self._free):
            raise InvariantError(f"free queue counts {len(self._free)} blocks and links {len(list(self._free))}")
        published = {digest: block for block, digest in enumerate(self._digest) if digest is not None}
        if published != self._table:
            raise InvariantError(f"{len(published)} blocks hold digests, the prefix table has {len(self._table)}")
        cached_free = sum(1 for block in self._table.values() if expected[block] == 0)
        if cached_free != self._num_cached_free:
            raise InvariantError(f"{cached_free} cached free blocks, counter says {self._num_cached_free}")
