"""The prefix table for a gateway that routes by it: what a `TableWatch` tells, as `smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So only blocks that such a prompt can hit are told, and only those on the device. Blocks
are named by the first 64 bits of their digests.

Setting the fields of one message after the other would take longer than can be spent on the blocks that decodes fill.
So every block is an event, and all of a batch are encoded together, from one that is encoded already and has every
number at its widest, which is valid in that encoding: up to three times the bytes for half the time. Fields of an
encoded message may follow each other in any order: batches are the few other fields, as the generated classes write
them, and then the events.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.block_hash import short_hashes
from pagekv.kvmanager.table_diff import Diff, Removed, Stored, Tier, join

# Blocks in one message; one is some 30 bytes and 3 to 5 for each of its tokens.
MAX_BLOCKS = 1024
_SHORT = struct.Struct(">q")


class KvEvents:
    """One subscription: numbers its batches from 1 and knows what it has told. Batches are serialised messages."""

    def __init__(self, root: Callable[[], bytes], block_size: int) -> None:
        """`root` gives the chain root of requests through the gateway, which depends on the model."""
        self._root_now = root
        self._root = root()
        self._block_size = block_size
        self._sequence = 0
        # Digests of the blocks told and not taken back.
        self._told: set[bytes] = set()

    def begin(self) -> bytes:
        """Makes the gateway forget what it knew of this manager; the table follows as blocks that were stored.

        It goes as a snapshot of one chunk, which is taken whatever sequence number the gateway expected.
        """
        batch = _cleared()
        batch.snapshot.count = 1
        return self._batch(batch)

    def stored(self, found: Sequence[Stored]) -> Iterator[bytes]:
        """Batches for blocks that entered the table, parents before children."""
        return self._batches([], found)

    def changed(self, diff: Diff) -> Iterator[bytes]:
        """Batches for what changed between two borders."""
        if diff.cleared:
            self._told.clear()
            self._root = self._root_now()
            yield self._batch(_cleared())
        yield from self._batches(diff.removed, diff.stored)

    def _batches(self, removed: Sequence[Removed], stored: Sequence[Stored]) -> Iterator[bytes]:
        gone, told = self._take_back(removed), self._tell(stored)
        blocks = join(told) if told else None
        for start in range(0, max(len(gone), len(blocks.digests) if blocks else 0), MAX_BLOCKS):
            end = start + MAX_BLOCKS
            batch = common.KvEventBatch()
            if gone[start:end]:
                batch.events.add().removed.block_hashes.extend(map(_signed, gone[start:end]))
            if blocks is None or start >= len(blocks.digests):
                yield self._batch(batch)
            else:
                yield self._batch(batch) + self._events(blocks.cut(start, end))

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
        """Encoded as `KvEventBatch.events`, one for each block."""
        digests, parents = blocks.digests, blocks.parents
        ids = np.frombuffer(blocks.tokens, np.uint32).reshape(len(digests), -1)
        width = 3 if int(ids.max()) < 1 << 21 else 5
        event, fields = _template(self._block_size, width, first=False)
        events = bytearray(event) * len(digests)
        rows = np.frombuffer(events, fields)
        rows["hash"], rows["parent"] = _varints(short_hashes(digests), 10), _varints(short_hashes(parents), 10)
        rows["tokens"] = _varints(ids, width)
        if self._root not in parents:
            return events
        # The first block of a sequence follows none.
        first, first_fields = _template(self._block_size, width, first=True)
        pieces: list[bytes | bytearray] = []
        done = 0
        for place, parent in enumerate(parents):
            if parent == self._root:
                piece = bytearray(first)
                row = np.frombuffer(piece, first_fields)
                row["hash"], row["tokens"] = rows["hash"][place], rows["tokens"][place]
                pieces += [events[len(event) * done : len(event) * place], piece]
                done = place + 1
        return b"".join([*pieces, events[len(event) * done :]])

    def _batch(self, batch: common.KvEventBatch) -> bytes:
        self._sequence += 1
        batch.sequence_number = self._sequence
        batch.timestamp = time.time()
        serialised: bytes = batch.SerializeToString()
        return serialised


def _cleared() -> common.KvEventBatch:
    return common.KvEventBatch(events=[common.KvCacheEvent(cleared=common.KvCacheCleared())])


def _signed(digest: bytes) -> int:
    """The 64-bit form of a digest (`block_hash.short_hash`) as the protocol's signed integer, the bits unchanged."""
    value: int = _SHORT.unpack_from(digest)[0]
    return value


@lru_cache
def _template(block_size: int, token_width: int, *, first: bool) -> tuple[bytes, np.dtype[np.void]]:
    """An event of one block, `first` in its sequence or not, with every number as wide as it may get (tokens: so many
    bytes); and where they are.
    """
    widest = min(2 ** (7 * token_width), 2**32) - 1
    block = common.KvBlock(block_hash=-1, token_ids=[widest] * block_size, block_size=block_size)
    stored = common.KvBlocksStored(blocks=[block], parent_block_hash=None if first else -2)
    event = common.KvEventBatch(events=[common.KvCacheEvent(stored=stored)]).SerializeToString()
    tokens = _varints(np.full(block_size, widest, np.uint32), token_width)
    fields = {
        "hash": (("u1", (10,)), event.index(b"\xff" * 9 + b"\x01")),
        "tokens": (("u1", tokens.shape), event.index(tokens.tobytes())),
    }
    if not first:
        fields["parent"] = (("u1", (10,)), event.index(b"\xfe" + b"\xff" * 8 + b"\x01"))
    formats, offsets = zip(*fields.values(), strict=True)
    return event, np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": len(event)})


def _varints(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """[..., width]: seven bits of each value a byte, lowest first, and in all but the last a bit that says so."""
    # Place by place, each for all values in a row: half the time of value by value.
    shifts = np.arange(0, 7 * width, 7).astype(values.dtype).reshape(-1, *[1] * values.ndim)
    encoded = (values >> shifts).astype(np.uint8)
    encoded[:-1] |= 0x80
    encoded[-1] &= 0x7F
    return np.moveaxis(encoded, 0, -1)
