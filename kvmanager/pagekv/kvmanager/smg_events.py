"""The prefix table for a gateway that routes by it: what a `TableWatch` tells, as `smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So only blocks that such a prompt can hit are told, and only those on the device. Blocks
are named by the first 64 bits of their digests.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator

from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.block_hash import sha256
from pagekv.kvmanager.table_diff import Key, Tier
from pagekv.kvmanager.table_watch import Diff, StoredBlock

# Blocks in one message; one is some hundred bytes.
MAX_BLOCKS = 1024
_SHORT = struct.Struct(">q")


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
        batch = self._cleared()
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
            yield self._cleared()
        yield from self._batches(diff.changes.items())

    def _batches(self, changes: Iterable[tuple[Key, StoredBlock | None]]) -> Iterator[common.KvEventBatch]:
        # Every block that fills up while a gateway listens comes through here, so messages are built in place.
        batch = common.KvEventBatch()
        told, root, block_size = self._told, self._root, self._block_size
        count = 0
        # The event that goes on, and the digest of the block told last, behind which the next may stand in it.
        stored: common.KvBlocksStored | None = None
        removed: common.KvBlocksRemoved | None = None
        last = b""
        for (tier, digest), block in changes:
            if tier is not Tier.DEVICE:
                continue
            if block is None:
                if digest not in told:
                    continue
                told.discard(digest)
                if removed is None:
                    removed, stored = batch.events.add().removed, None
                removed.block_hashes.append(_signed(digest))
            else:
                parent, tokens = block
                # Only what a prompt of tokens alone, in no namespace, leads to.
                if (parent != root and parent not in told) or sha256(parent + tokens.tobytes()).digest() != digest:
                    continue
                told.add(digest)
                if stored is None or parent != last:
                    stored, removed = batch.events.add().stored, None
                    if parent != root:
                        stored.parent_block_hash = _signed(parent)
                stored.blocks.add(block_hash=_signed(digest), token_ids=tokens, block_size=block_size)
                last = digest
            count += 1
            if count == MAX_BLOCKS:
                yield self._number(batch)
                batch, count, stored, removed = common.KvEventBatch(), 0, None, None
        if count:
            yield self._number(batch)

    def _cleared(self) -> common.KvEventBatch:
        return self._number(common.KvEventBatch(events=[common.KvCacheEvent(cleared=common.KvCacheCleared())]))

    def _number(self, batch: common.KvEventBatch) -> common.KvEventBatch:
        self._sequence += 1
        batch.sequence_number = self._sequence
        batch.timestamp = time.time()
        return batch


def _signed(digest: bytes) -> int:
    """The 64-bit form of a digest (`block_hash.short_hash`) as the protocol's signed integer, the bits unchanged."""
    value: int = _SHORT.unpack_from(digest)[0]
    return value
