"""The prefix table for a gateway that routes by it: what a `TableWatch` tells, as `smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So only blocks that such a prompt can hit are told, and only those on the device. Blocks
are named by the first 64 bits of their digests.

Setting the fields of one message after the other would take longer than can be spent on the blocks that decodes fill,
one each. So events of one block are encoded all together, from one that is encoded already and has every number at its
widest. The generated classes read that, and write what is sent.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.block_hash import short_hashes
from pagekv.kvmanager.table_diff import Diff, Removed, Stored, Tier, join

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

    def stored(self, found: Sequence[Stored]) -> Iterator[common.KvEventBatch]:
        """Batches for blocks that entered the table, parents before children."""
        return self._batches([], found)

    def changed(self, diff: Diff) -> Iterator[common.KvEventBatch]:
        """Batches for what changed between two borders."""
        if diff.cleared:
            self._told.clear()
            self._root = self._root_now()
            yield self._cleared()
        yield from self._batches(diff.removed, diff.stored)

    def _batches(self, removed: Sequence[Removed], stored: Sequence[Stored]) -> Iterator[common.KvEventBatch]:
        gone, told = self._take_back(removed), self._tell(stored)
        blocks = join(told) if told else None
        for start in range(0, max(len(gone), len(blocks.digests) if blocks else 0), MAX_BLOCKS):
            end = start + MAX_BLOCKS
            batch = common.KvEventBatch()
            if gone[start:end]:
                batch.events.add().removed.block_hashes.extend(map(_signed, gone[start:end]))
            if blocks is not None and start < len(blocks.digests):
                batch.MergeFromString(self._events(blocks.cut(start, end)))
            yield self._number(batch)

    def _take_back(self, found: Sequence[Removed]) -> list[bytes]:
        """Digests of blocks that were told and are no more."""
        gone = [digest for tier, digests in found if tier is Tier.DEVICE for digest in digests if digest in self._told]
        self._told.difference_update(gone)
        return gone

    def _tell(self, found: Sequence[Stored]) -> list[Stored]:
        """Only what a prompt of tokens alone, in no namespace, leads to."""
        told, root = self._told, self._root
        kept: list[Stored] = []
        for stored in found:
            if stored.tier is not Tier.DEVICE or not stored.text:
                continue
            if told.issuperset(stored.parents):
                told.update(stored.digests)
                kept.append(stored)
                continue
            for place, (digest, parent) in enumerate(zip(stored.digests, stored.parents, strict=True)):
                if parent in told or parent == root:
                    told.add(digest)
                    kept.append(stored.cut(place, place + 1))
        return kept

    def _events(self, blocks: Stored) -> bytes | bytearray:
        """Encoded as `KvEventBatch.events`. Blocks that follow one another are one event."""
        digests, parents = blocks.digests, blocks.parents
        ids = np.frombuffer(blocks.tokens, np.uint32).reshape(len(digests), -1)
        hashes, before = short_hashes(digests), short_hashes(parents)
        single, fields = _single(self._block_size)
        singles = bytearray(single) * len(digests)
        rows = np.frombuffer(singles, fields)
        rows["hash"], rows["parent"], rows["tokens"] = _varints(hashes, 10), _varints(before, 10), _varints(ids, 5)
        begins = np.flatnonzero(before[1:] != hashes[:-1]) + 1
        if len(begins) == len(digests) - 1 and self._root not in parents:
            return singles
        events: list[bytes | bytearray] = []
        for begin, end in pairwise([0, *begins.tolist(), len(digests)]):
            first = parents[begin] == self._root
            if end - begin == 1 and not first:
                events.append(singles[begin * len(single) : end * len(single)])
            else:
                stored = common.KvBlocksStored(parent_block_hash=None if first else _signed(parents[begin]))
                for digest, _, token_ids in blocks.cut(begin, end).each():
                    stored.blocks.add(block_hash=_signed(digest), token_ids=token_ids, block_size=self._block_size)
                events.append(common.KvEventBatch(events=[common.KvCacheEvent(stored=stored)]).SerializeToString())
        return b"".join(events)

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


@lru_cache
def _single(block_size: int) -> tuple[bytes, np.dtype[np.void]]:
    """An event of one block that follows another, every number at its widest; and where they are."""
    block = common.KvBlock(block_hash=-1, token_ids=[2**32 - 1] * block_size, block_size=block_size)
    stored = common.KvBlocksStored(blocks=[block], parent_block_hash=-2)
    event = common.KvEventBatch(events=[common.KvCacheEvent(stored=stored)]).SerializeToString()
    fields = {
        "hash": (("u1", (10,)), event.index(b"\xff" * 9 + b"\x01")),
        "parent": (("u1", (10,)), event.index(b"\xfe" + b"\xff" * 8 + b"\x01")),
        "tokens": (("u1", (block_size, 5)), event.index(b"\xff\xff\xff\xff\x0f" * block_size)),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    return event, np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": len(event)})


def _varints(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """[..., width]: seven bits of each value a byte, lowest first, and in all but the last a bit that says so."""
    encoded = np.empty((*values.shape, width), np.uint8)
    for place in range(width):
        encoded[..., place] = values >> 7 * place
    encoded[..., :-1] |= 0x80
    encoded[..., -1] &= 0x7F
    return encoded
