"""The prefix table for a gateway that routes by it: what a `TableWatch` tells, as `smg.grpc.common.KvEventBatch`.

A gateway matches the tokens of a prompt against blocks from the start of a sequence, and its requests have no
namespace, adapter or media. So only blocks that such a prompt can hit are told, and only those on the device.

Setting the fields of one message after the other would take longer than can be spent on the blocks that decodes fill.
So every block is an event, and all of a batch are encoded together, from one that is encoded already and has every
number at its widest, which is valid in that encoding. Blocks are named by the first 56 bits of their digests, which
take 8 bytes, and token ids take 4: a number's 7-bit pieces are spread over a machine word of the same size. Fields of
an encoded message may follow each other in any order: batches are the few other fields, as the generated classes write
them, and then the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.kvcache.block_hash import short_hashes
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier, join

# Blocks in one message; one is some 30 bytes and 4 for each of its tokens.
MAX_BLOCKS = 1024
# Beyond the token ids that can be told: those of four bytes.
MAX_VOCABULARY = 1 << 28


class KvEvents:
    """One subscription: numbers its batches from 1. Batches are serialised messages."""

    def __init__(self, root: Callable[[], bytes], block_size: int) -> None:
        """`root` gives the chain root of requests through the gateway, which depends on the model."""
        self._root_now = root
        self._root = root()
        self._block_size = block_size
        self._sequence = 0
        # Digests of blocks in the table that a gateway's prompt cannot hit.
        self._untold: set[bytes] = set()

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
            self._untold.clear()
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
                batch.events.add().removed.block_hashes.extend(_names(gone[start:end]).tolist())
            if blocks is None or start >= len(blocks.digests):
                yield self._batch(batch)
            else:
                yield self._batch(batch) + self._events(blocks.cut(start, end))

    def _take_back(self, found: Sequence[Removed]) -> list[bytes]:
        """Digests of blocks that were told and are no more."""
        gone = [*chain.from_iterable(removed.digests for removed in found if removed.tier is Tier.DEVICE)]
        if not self._untold:
            return gone
        told = [digest for digest in gone if digest not in self._untold]
        self._untold.difference_update(gone)
        return told

    def _tell(self, found: Sequence[Stored]) -> list[Stored]:
        """Only what a prompt of tokens alone, in no namespace, leads to."""
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

    def _events(self, blocks: Stored) -> bytes | bytearray:
        """Encoded as `KvEventBatch.events`, one for each block."""
        parents = blocks.parents
        ids = np.frombuffer(blocks.tokens, np.uint32).reshape(len(parents), -1)
        event, fields = _template(self._block_size, first=False)
        events = bytearray(event) * len(parents)
        rows = np.frombuffer(events, fields)
        rows["hash"], rows["parent"] = _varints(_names(blocks.digests)), _varints(_names(parents))
        rows["tokens"] = _varints(ids)
        if self._root not in parents:
            return events
        # The first block of a sequence follows none.
        first, first_fields = _template(self._block_size, first=True)
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


def _names(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """What blocks are called: the first 56 bits of each digest."""
    return short_hashes(digests).astype(np.uint64) >> np.uint64(8)


@lru_cache
def _template(block_size: int, *, first: bool) -> tuple[bytes, np.dtype[np.void]]:
    """An event of one block, `first` in its sequence or not, every number at its widest; and where they are."""
    name, parent, token = (1 << 56) - 1, (1 << 56) - 2, MAX_VOCABULARY - 1
    block = common.KvBlock(block_hash=name, token_ids=[token] * block_size, block_size=block_size)
    stored = common.KvBlocksStored(blocks=[block], parent_block_hash=None if first else parent)
    event = common.KvEventBatch(events=[common.KvCacheEvent(stored=stored)]).SerializeToString()
    # The block's fields follow in the order of their numbers, its name before its tokens.
    at = event.index(b"\xff" * 7 + b"\x7f")
    fields = {
        "hash": ("<u8", at),
        "tokens": (("<u4", (block_size,)), event.index(b"\xff\xff\xff\x7f" * block_size, at + 8)),
    }
    if not first:
        fields["parent"] = ("<u8", event.index(b"\xfe" + b"\xff" * 6 + b"\x7f"))
    formats, offsets = zip(*fields.values(), strict=True)
    return event, np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": len(event)})


def _varints(values: NDArray[Any]) -> NDArray[Any]:
    """uint32 below 2**28 or uint64 below 2**56, each with its lowest seven bits in the lowest byte and so on, and in
    all bytes but the highest a bit that says that another follows.
    """
    if values.itemsize == 8:
        values = values & 0xFFFFFFF | (values & 0xFFFFFFF0000000) << 4
        # Each half, then each quarter, of what there is gets apart from the other in the same way.
        values = values & 0x3FFF00003FFF | (values & 0xFFFC0000FFFC000) << 2
        return values & 0x7F007F007F007F | (values & 0x3F803F803F803F80) << 1 | 0x80808080808080
    values = values & 0x3FFF | (values & 0xFFFC000) << 2
    return values & 0x7F007F | (values & 0x3F803F80) << 1 | 0x808080
