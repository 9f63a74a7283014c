"""The prefix table for a gateway that routes by cached prefixes: batches of a `TableWatch` as
`smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So batches contain only device blocks that such a prompt can hit. A block's name is the
first 56 bits of its digest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.kvcache.block_hash import short_hash
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier, join

# Most blocks of one message, and most tokens of these blocks. Making a message of this size takes 2 to 3 milliseconds,
# in which the event loop does nothing else.
MAX_BLOCKS = 512
MAX_TOKENS = 32_768


class KvEvents:
    """One subscription. Batches are serialised messages, numbered from 1."""

    def __init__(self, root: Callable[[], bytes], block_size: int) -> None:
        """`root` gives the chain root of requests through the gateway, which depends on the model."""
        self._root_now = root
        self._root = root()
        self._block_size = block_size
        self._max_blocks = min(MAX_BLOCKS, MAX_TOKENS // block_size)
        self._sequence = 0
        # Digests of device blocks in the table that the gateway was not told of, because its prompts cannot hit them.
        self._untold: set[bytes] = set()

    def begin(self) -> bytes:
        """A batch that makes the gateway drop its copy of this manager's table; the table follows as stored blocks.

        It is sent as a snapshot of one chunk, which a gateway accepts whatever sequence number it expects.
        """
        batch = _cleared()
        batch.snapshot.count = 1
        return self._batch(batch)

    def stored(self, found: Sequence[Stored]) -> Iterator[bytes]:
        """Batches for blocks that entered the table, parents before children."""
        return self._batches([], found)

    def changed(self, diff: Diff) -> Iterator[bytes]:
        if diff.cleared:
            self._untold.clear()
            self._root = self._root_now()
            yield self._batch(_cleared())
        yield from self._batches(diff.removed, diff.stored)

    def _batches(self, removed: Sequence[Removed], stored: Sequence[Stored]) -> Iterator[bytes]:
        gone, told = self._take_back(removed), self._tell(stored)
        blocks = join(told) if told else None
        for start in range(0, max(len(gone), len(blocks.digests) if blocks else 0), self._max_blocks):
            end = start + self._max_blocks
            batch = common.KvEventBatch()
            if gone[start:end]:
                batch.events.add().removed.block_hashes.extend(map(_name, gone[start:end]))
            if blocks is not None and start < len(blocks.digests):
                self._add_stored(batch, blocks.cut(start, end))
            yield self._batch(batch)

    def _add_stored(self, batch: common.KvEventBatch, blocks: Stored) -> None:
        for digest, parent, token_ids in blocks.each():
            stored = batch.events.add().stored
            stored.blocks.add(block_hash=_name(digest), token_ids=token_ids, block_size=self._block_size)
            # The first block of a sequence has no parent.
            if parent != self._root:
                stored.parent_block_hash = _name(parent)

    def _take_back(self, found: Sequence[Removed]) -> list[bytes]:
        """Digests of those removed blocks that the gateway was told of."""
        gone = [*chain.from_iterable(removed.digests for removed in found if removed.tier is Tier.DEVICE)]
        if not self._untold:
            return gone
        told = [digest for digest in gone if digest not in self._untold]
        self._untold.difference_update(gone)
        return told

    def _tell(self, found: Sequence[Stored]) -> list[Stored]:
        """The stored blocks that a gateway's prompt can hit; the digests of the others go into `_untold`."""
        untold = self._untold
        told: list[Stored] = []
        for stored in found:
            if stored.tier is not Tier.DEVICE:
                continue
            if not stored.text or (stored.first and stored.parents[0] != self._root):
                untold.update(stored.digests)
            elif not untold or untold.isdisjoint(stored.parents):
                told.append(stored)
            else:
                for place, (digest, parent) in enumerate(zip(stored.digests, stored.parents, strict=True)):
                    if parent in untold:
                        untold.add(digest)
                    else:
                        told.append(stored.cut(place, place + 1))
        return told

    def _batch(self, batch: common.KvEventBatch) -> bytes:
        self._sequence += 1
        batch.sequence_number = self._sequence
        batch.timestamp = time.time()
        serialised: bytes = batch.SerializeToString()
        return serialised


def _cleared() -> common.KvEventBatch:
    return common.KvEventBatch(events=[common.KvCacheEvent(cleared=common.KvCacheCleared())])


def _name(digest: bytes) -> int:
    return short_hash(digest) >> 8
