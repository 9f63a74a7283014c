"""The host pool: the content and the holders of each block of host memory, and what is evicted next (DESIGN 5).

The manager owns this map as it owns the device's; the executor only copies. A host block with a key, the digest of a
full block, can be hit by any sequence with the same prefix. A block without a key is private to the preempted sequence
that holds it.

Every hit compares the token ids of the block and the prefix that it follows, so no hash function, however bad, makes
one prefix pass for another. A prefix is recognised by its digest object, not by the digest's value. Each object is made
for the tokens of one prefix and passed on with it, so the same object means the same tokens even if values collide. If
equal prefixes were hashed twice, sequences take over the object that a tier has already.

    free      ref_count 0, no key      in the free queue
    cached    ref_count 0, keyed       in the free queue: can be hit, or evicted
    held      ref_count > 0            needed by preempted sequences when they return
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import Root
from pagekv.kvmanager.kvcache.eviction_policy import FreeQueue
from pagekv.kvmanager.kvcache.fresh_memory import fresh_zeros

if TYPE_CHECKING:
    from pagekv.kvmanager.kvcache.events.log import TableLog
    from pagekv.kvmanager.kvcache.prefix_table import Names

NO_BLOCK = -1


class HostPool:
    """Fixed pool of `num_blocks` host blocks of `block_size` tokens; 0 blocks make one that is always full."""

    def __init__(self, num_blocks: int, block_size: int, log: TableLog | None = None) -> None:
        self.num_blocks = num_blocks
        self._log = log
        # Holders of every block, [num_blocks]. Not to be changed by others.
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._free = FreeQueue(num_blocks)
        self._key: list[bytes | None] = [None] * num_blocks
        # Digest of the block or chain root before each keyed block; the block before need not be in the host pool. The
        # object matters, not only its value, see above.
        self._parent: list[bytes] = [b""] * num_blocks
        # Namespace and adapter of keyed blocks that have any.
        self._names: dict[int, Names] = {}
        self._block_of: dict[bytes, int] = {}
        self._tokens = fresh_zeros((num_blocks, block_size), np.uint32)
        self.evictions = 0
        self.hash_alarms = 0

    # -- gauges

    @property
    def num_held(self) -> int:
        """Blocks that preempted sequences hold."""
        return self.num_blocks - len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be hit, held ones included."""
        return len(self._block_of)

    # -- asking

    def key(self, block: int) -> bytes | None:
        """The digest of the content; None unless the block can be hit."""
        return self._key[block]

    def keyed_blocks(self) -> NDArray[np.int32]:
        """The blocks that can be hit, in no particular order."""
        return np.fromiter(self._block_of.values(), np.int32, len(self._block_of))

    def find(
        self,
        digests: Sequence[bytes | None],
        tokens: NDArray[np.uint32],
        parents: Sequence[bytes],
        *,
        hashed_anew: bool = False,
    ) -> list[int]:
        """The block with each of these digests and token ids that follows the digest object in `parents`; NO_BLOCK
        where there is none. `tokens`, [n, block_size], and `parents` end early where no digest follows. `hashed_anew`:
        digests may be new objects, so a block is also found if it follows the block found for the digest before it.
        Changes nothing but the alarm counter.
        """
        blocks, collisions = self._look_up(digests, tokens, parents, hashed_anew=hashed_anew)
        self.hash_alarms += collisions
        return blocks

    def num_missing(self, digests: Sequence[bytes | None], tokens: NDArray[np.uint32], parents: Sequence[bytes]) -> int:
        """How many of these contents `find` would not find. Changes nothing: `keep` raises the alarm for them."""
        return self._look_up(digests, tokens, parents)[0].count(NO_BLOCK)

    def _look_up(
        self,
        digests: Sequence[bytes | None],
        tokens: NDArray[np.uint32],
        parents: Sequence[bytes],
        *,
        hashed_anew: bool = False,
    ) -> tuple[list[int], int]:
        """The blocks as `find` returns them, and how many others have one of the digests for other tokens."""
        collisions = 0
        held_under = self._block_of.get
        blocks = [NO_BLOCK if digest is None else held_under(digest, NO_BLOCK) for digest in digests]
        at = [position for position, block in enumerate(blocks) if block != NO_BLOCK]
        if at:
            same = (self._tokens[[blocks[position] for position in at]] == tokens[at]).all(axis=1).tolist()
            for position, equal in zip(at, same, strict=True):
                before = NO_BLOCK
                if hashed_anew and position and digests[position - 1] is parents[position]:
                    before = blocks[position - 1]
                if not equal or not self._follows(blocks[position], parents[position], before):
                    collisions += not equal
                    blocks[position] = NO_BLOCK
        return blocks, collisions

    def _follows(self, block: int, parent: bytes, before: int) -> bool:
        """Whether a block follows the digest object `parent` or, unless NO_BLOCK, the key object of block `before`."""
        kept = self._parent[block]
        if isinstance(kept, Root) and isinstance(parent, Root):
            return kept == parent
        return kept is parent or (before != NO_BLOCK and kept is self._key[before])

    def lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def columns(self) -> tuple[list[tuple[int, bytes, bytes]], NDArray[np.uint32], dict[int, Names]]:
        """A copy of the pool's contents: block, key and parent digest of each keyed block; the tokens of every block,
        [num_blocks, block_size]; namespace and adapter of blocks that have any.
        """
        entries = [(block, digest, self._parent[block]) for digest, block in self._block_of.items()]
        return entries, self._tokens.copy(), self._names.copy()

    # -- holding

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each block, none named twice; held blocks are not evicted."""
        wanted = np.array(blocks, np.int32)
        self._free.remove(wanted[self.ref_counts[wanted] == 0])
        self.ref_counts[wanted] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder of each block, none named twice; blocks without holders join the tail of the free queue."""
        held = np.array(blocks, np.int32)
        left = self.ref_counts[held] - 1
        if len(left) and left.min() < 0:
            raise InvariantError(f"release of host block {blocks[int(left.argmin())]}, which nobody holds")
        self.ref_counts[held] = left
        self._free.append(held[left == 0])

    def keep(
        self,
        digests: Sequence[bytes | None],
        tokens: NDArray[np.uint32],
        parents: Sequence[bytes],
        names: Sequence[Names | None] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Holds a block for each of these contents, in order: the block that has the content already, or else a block
        to be filled, which evicts the least recently used content. Ends early when all blocks are held. Returns the
        blocks, and the positions of those to be filled.

        Blocks get the keys `digests`, each digest once, with their token ids, [n, block_size], and parent digests. A
        block whose digest is None, or stands for another content already, is private. `tokens` and `parents` end early
        where no digest follows. `names`: namespace and adapter of each block, None if it has neither.
        """
        found = self.find(digests, tokens, parents)
        blocks: list[int] = []
        fresh: list[int] = []
        while (begin := len(blocks)) < len(found):
            end = begin
            # A block that was found may have been evicted since, for one of these contents.
            while end < len(found) and found[end] != NO_BLOCK and self._key[found[end]] == digests[end]:
                end += 1
            if end > begin:
                self.hold(found[begin:end])
                blocks += found[begin:end]
                continue
            end += 1
            while end < len(found) and found[end] == NO_BLOCK:
                end += 1
            taken = self._allocate(
                digests[begin:end], tokens[begin:end], parents[begin:end], names[begin:end] if names else None
            )
            fresh += range(begin, begin + len(taken))
            blocks += taken
            if len(taken) < end - begin:
                break
        return blocks, fresh

    def _allocate(
        self,
        digests: Sequence[bytes | None],
        tokens: NDArray[np.uint32],
        parents: Sequence[bytes],
        names: Sequence[Names | None] | None,
    ) -> list[int]:
        """Takes free blocks for the first of these contents, as many as there are."""
        taken = self._free.pop(min(len(digests), len(self._free)))
        self.ref_counts[taken] = 1
        blocks: list[int] = taken.tolist()
        keyed: list[int] = []
        block_of, log, keys = self._block_of, self._log, self._key
        if log is not None and not log.watched:
            log = None
        for position, (block, digest) in enumerate(zip(blocks, digests, strict=False)):
            if keys[block] is not None:
                evicted = self._remove_key(block)
                self.evictions += 1
                if log is not None:
                    log.host_removed(evicted)
            if digest is not None and block_of.setdefault(digest, block) == block:
                keys[block] = digest
                self._parent[block] = parents[position]
                keyed.append(position)
                named = names[position] if names is not None else None
                if named is not None:
                    self._names[block] = named
                if log is not None:
                    log.host_stored(digest, parents[position], tokens[position], named)
        self._tokens[taken[keyed]] = tokens[keyed]
        return blocks

    def invalidate(self, digests: Sequence[bytes]) -> None:
        """Removes these keys, whose content is void. Held blocks stay held and become private."""
        for block in [self._block_of[digest] for digest in digests if digest in self._block_of]:
            removed = self._remove_key(block)
            if self._log is not None:
                self._log.host_removed(removed)

    def clear(self) -> None:
        """Removes every key; held blocks become private. The log is told by the device pool, which is cleared next."""
        for block in list(self._block_of.values()):
            self._remove_key(block)

    def _remove_key(self, block: int) -> bytes:
        """Removes and returns the key of a block, which must have one."""
        key = self._key[block]
        assert key is not None
        del self._block_of[key]
        self._key[block] = None
        self._names.pop(block, None)
        return key
