"""The prefix table for a gateway that routes by it: what a `TableWatch` tells, as `smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So only blocks that such a prompt can hit are told, and only those on the device. Blocks
are named by the first 64 bits of their digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.block_hash import block_digest, short_hash
from pagekv.kvmanager.table_diff import Key, Tier
from pagekv.kvmanager.table_watch import Diff, StoredBlock

# Blocks in one message; one is some hundred bytes.
MAX_BLOCKS = 1024
_SIGN = 1 << 63


class KvEvents:
    """One subscription: numbers its batches from 1 and knows what it has told."""

    def __init__(self, root: Callable[[], bytes], block_size: int) -> None:
        """`root` gives the chain root of requests through the gateway, which depends on the model."""
        self._root_now = root
        self._root = root()
        self._block_size = block_size
        self._sequence = 0
        # Digests of the blocks told and not taken back.
        self._told: set[bytes] = set()

    def begin(self) -> common.KvEventBatch:
        """Makes the gateway forget what it knew of this manager; the table follows as blocks that were stored.

        It goes as a snapshot of one chunk, which is taken whatever sequence number the gateway expected.
        """
        batch = self._batch([common.KvCacheEvent(cleared=common.KvCacheCleared())])
        batch.snapshot.count = 1
        return batch

    def stored(self, blocks: Iterable[tuple[Key, StoredBlock]]) -> Iterator[common.KvEventBatch]:
        """Batches for blocks that entered the table, parents before children."""
        return self._batches(blocks)

    def changed(self, diff: Diff) -> Iterator[common.KvEventBatch]:
        """Batches for what changed between two borders."""
        if diff.cleared:
            self._told.clear()
            self._root = self._root_now()
            yield self._batch([common.KvCacheEvent(cleared=common.KvCacheCleared())])
        yield from self._batches(diff.changes.items())

    def _batches(self, changes: Iterable[tuple[Key, StoredBlock | None]]) -> Iterator[common.KvEventBatch]:
        events: list[common.KvCacheEvent] = []
        blocks = 0
        # Digest of the last block told, behind which the next may stand in one event.
        last = b""
        for (tier, digest), block in changes:
            if tier is not Tier.DEVICE:
                continue
            if block is None:
                if digest not in self._told:
                    continue
                self._told.discard(digest)
                if not (events and events[-1].HasField("removed")):
                    events.append(common.KvCacheEvent(removed=common.KvBlocksRemoved()))
                events[-1].removed.block_hashes.append(_signed(digest))
            else:
                if not self._can_be_hit(digest, block):
                    continue
                self._told.add(digest)
                if not (events and events[-1].HasField("stored") and block.parent == last):
                    stored = common.KvBlocksStored(tier=common.KV_CACHE_TIER_DEVICE)
                    if block.parent != self._root:
                        stored.parent_block_hash = _signed(block.parent)
                    events.append(common.KvCacheEvent(stored=stored))
                events[-1].stored.blocks.append(
                    common.KvBlock(block_hash=_signed(digest), token_ids=block.token_ids, block_size=self._block_size)
                )
                last = digest
            blocks += 1
            if blocks == MAX_BLOCKS:
                yield self._batch(events)
                events, blocks = [], 0
        if events:
            yield self._batch(events)

    def _can_be_hit(self, digest: bytes, block: StoredBlock) -> bool:
        """Whether a prompt of tokens alone, in no namespace, leads to it."""
        if block.parent != self._root and block.parent not in self._told:
            return False
        return digest == block_digest(block.parent, block.token_ids.tobytes())

    def _batch(self, events: list[common.KvCacheEvent]) -> common.KvEventBatch:
        self._sequence += 1
        return common.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)


def _signed(digest: bytes) -> int:
    """The 64-bit form of a digest as the protocol's signed integer, the bits unchanged."""
    value = short_hash(digest)
    return value - 2 * _SIGN if value & _SIGN else value
