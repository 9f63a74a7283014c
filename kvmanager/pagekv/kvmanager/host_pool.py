"""The host pool: which block of host memory keeps which content, who needs it, and what makes room next (DESIGN 5).

The manager owns this map exactly as it owns the device's; the executor only copies. A host block has a key, the digest
of a full block, so that any sequence with the same prefix can get it back; or none, and then it is private to the one
preempted sequence that holds it. Token ids are compared on every hit.

    free      ref_count 0, no key      in the free queue
    cached    ref_count 0, keyed       in the free queue: can be hit, or evicted
    held      ref_count > 0            by preempted sequences that will want it back
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.free_queue import FreeQueue

NO_BLOCK = -1


class HostLog(Protocol):
    """Who wants to know which keys come and go one by one. Digests are 32 bytes."""

    def host_stored(self, digest: bytes, parent: bytes) -> None: ...

    def host_removed(self, digest: bytes) -> None: ...


class HostPool:
    """Fixed pool of `num_blocks` host blocks of `block_size` tokens; 0 blocks make one that is always full."""

    def __init__(self, num_blocks: int, block_size: int, log: HostLog | None = None) -> None:
        self.num_blocks = num_blocks
        self._log = log
        self._ref_count = np.zeros(num_blocks, np.int32)
        self._free = FreeQueue(num_blocks)
        self._key: list[bytes | None] = [None] * num_blocks
        # Of keyed blocks: the digest of the block or chain root before it, which need not be here.
        self._parent: list[bytes] = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._tokens = np.zeros((num_blocks, block_size), np.uint32)
        self.evictions = 0
        self.hash_alarms = 0

    # -- gauges

    @property
    def num_held(self) -> int:
        """Blocks that preempted sequences hold."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be hit, held ones included."""
        return len(self._block_of)

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """Holders of every block, [num_blocks]. Not to be changed."""
        return self._ref_count

    # -- asking

    def key(self, block: int) -> bytes | None:
        """The digest of what the block holds; None unless it can be hit."""
        return self._key[block]

    def keyed_blocks(self) -> NDArray[np.int32]:
        """The blocks that can be hit, in no particular order."""
        return np.fromiter(self._block_of.values(), np.int32, len(self._block_of))

    def find(self, digest: bytes, tokens: NDArray[np.uint32]) -> int:
        """The block with this digest and these token ids, [block_size]; NO_BLOCK when there is none. Changes nothing
        but the alarm counter.
        """
        block = self._block_of.get(digest, NO_BLOCK)
        if block != NO_BLOCK and not (self._tokens[block] == tokens).all():
            self.hash_alarms += 1
            return NO_BLOCK
        return block

    def lookup(self, digest: bytes) -> int | None:
        """The block with this key."""
        return self._block_of.get(digest)

    def token_ids(self, block: int) -> list[int]:
        """The token ids of a keyed block, [block_size]."""
        ids: list[int] = self._tokens[block].tolist()
        return ids

    def columns(self) -> tuple[list[tuple[int, bytes, bytes]], NDArray[np.uint32]]:
        """A copy of what is keyed: block, key and the digest before it; and every block's tokens,
        [num_blocks, block_size].
        """
        entries = [(block, digest, self._parent[block]) for digest, block in self._block_of.items()]
        return entries, self._tokens.copy()

    # -- holding

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block; nobody can evict them any more."""
        for block in blocks:
            if not self._ref_count[block]:
                self._free.remove(np.array([block], np.int32))
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes a holder off each block; at 0 it is the last to be evicted of those that are free by then."""
        for block in blocks:
            if self._ref_count[block] < 1:
                raise InvariantError(f"release of host block {block}, which nobody holds")
            self._ref_count[block] -= 1
            if not self._ref_count[block]:
                self._free.append(np.array([block], np.int32))

    def take(self, digest: bytes | None, tokens: NDArray[np.uint32] | None, parent: bytes = b"") -> int:
        """A block for a new content, held once, and NO_BLOCK when all are held. It evicts what was used least recently.

        Keyed by `digest` with its token ids, [block_size], and the digest before it, `parent`; None, or a digest that
        belongs to another content already: private.
        """
        if not len(self._free):
            return NO_BLOCK
        (block,) = self._free.pop(1).tolist()
        evicted = self._forget(block)
        if evicted is not None:
            self.evictions += 1
            if self._log is not None:
                self._log.host_removed(evicted)
        self._ref_count[block] = 1
        if digest is not None and tokens is not None and self._block_of.setdefault(digest, block) == block:
            self._key[block] = digest
            self._parent[block] = parent
            self._tokens[block] = tokens
            if self._log is not None:
                self._log.host_stored(digest, parent)
        return int(block)

    def clear(self) -> None:
        """Forgets every key. Held blocks stay held, by those who know them. The log hears of it from the device's pool,
        which is cleared next.
        """
        for block in list(self._block_of.values()):
            self._forget(block)

    def _forget(self, block: int) -> bytes | None:
        """The key that it had."""
        key = self._key[block]
        if key is not None:
            del self._block_of[key]
            self._key[block] = None
        return key

    # -- proof

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Recomputes every count from the blocks that each sequence holds; raises InvariantError."""
        expected = np.zeros(self.num_blocks, np.int32)
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        wrong = np.flatnonzero(expected != self._ref_count)
        if len(wrong):
            block = int(wrong[0])
            raise InvariantError(
                f"host block {block}: ref_count {self._ref_count[block]}, held by {expected[block]} sequences"
            )
        unheld = np.flatnonzero(expected == 0).tolist()
        if sorted(self._free) != unheld:
            raise InvariantError(f"{len(unheld)} host blocks are held by nobody, {len(self._free)} are free")
        keyed = {key: block for block, key in enumerate(self._key) if key is not None}
        if keyed != self._block_of:
            raise InvariantError(f"{len(keyed)} host blocks have keys, the map has {len(self._block_of)}")
