"""A strict reader of KV events, declared as vLLM 0.33 declares them (`vllm/distributed/kv_events.py`), and what such
a reader holds: the blocks of each medium. Unknown fields, missing ones and wrong types are errors, and so is a stream
that cannot be true: a block stored twice, one removed that is not there, one whose parent on the device is not.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq.asyncio


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(KVEventBatch, strict=True)
KEYS = {
    "BlockStored": ["type", *BlockStored.__struct_fields__],
    "BlockRemoved": ["type", *BlockRemoved.__struct_fields__],
    "AllBlocksCleared": ["type"],
}


def decode(payload: bytes) -> KVEventBatch:
    """One batch; also checks that every event has all keys in their order, which the decoder lets pass."""
    _, events, _ = msgspec.msgpack.decode(payload)
    for event in events:
        assert list(event) == KEYS[event["type"]]
    return _decoder.decode(payload)


class EventReplica:
    """Block hash to parent hash and token ids, by medium."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, tuple[int | None, list[int]]]] = {"GPU": {}, "CPU": {}}
        self.names: dict[int, tuple[str | None, tuple[Any, ...] | None]] = {}

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.blocks.values():
                    blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[event.medium or ""][block_hash]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        blocks, parent, size = self.blocks[event.medium or ""], event.parent_block_hash, event.block_size
        assert len(event.token_ids) in (0, size * len(event.block_hashes))
        assert (event.lora_id, event.group_idx, event.kv_cache_spec_kind) == (None, 0, "full_attention")
        assert event.extra_keys is not None
        assert event.medium == "CPU" or parent is None or parent in blocks
        for index, (block_hash, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
            assert block_hash not in blocks
            blocks[block_hash] = parent, event.token_ids[index * size : (index + 1) * size]
            self.names[block_hash] = event.lora_name, keys
            parent = block_hash


async def replayed(dealer: zmq.asyncio.Socket) -> EventReplica:
    """The tables that all events so far add up to; the socket is connected to the endpoint for replays."""
    replica = EventReplica()
    await dealer.send_multipart((b"", bytes(8)))
    while True:
        _, _, number, payload = await asyncio.wait_for(dealer.recv_multipart(), 120)
        if not payload:
            assert number == b"\xff" * 8
            return replica
        replica.apply(decode(payload))
