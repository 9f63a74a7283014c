"""Changes of the prefix tables as vLLM's KV events, which routers and cache indexers read: maps with a `type`, packed
as msgpack `[seconds since 1970, [event, ...], data parallel rank]`.

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys,
                      group_idx, kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Fields and their order are those of `vllm/distributed/kv_events.py` in vLLM 0.33, which readers that decode by position
or refuse unknown keys need. Hashes are the first 64 bits of ours. A parent of null begins a chain. `medium` is GPU for
the device's pool, whatever the device is, and CPU for the host's, because readers know no other words.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from pagekv.kvmanager.block_hash import short_hash
from pagekv.kvmanager.event_identities import BlockIdentity, EventIdentities
from pagekv.kvmanager.table_diff import Key, Tier
from pagekv.kvmanager.table_watch import Diff, StoredBlock

# Tokens in one batch, so that none takes the event loop for long or grows beyond some tens of kilobytes.
MAX_BATCH_TOKENS = 16_384
_MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
# All layers are one group, and every block holds all of its tokens' keys and values.
_GROUP = 0
_KIND = "full_attention"
_RANK = 0

Event = dict[str, Any]


class KvEventFormat:
    """Turns changes into batches of events."""

    def __init__(self, identities: EventIdentities, *, token_ids: bool) -> None:
        """`token_ids`: False leaves them out; readers then see which blocks there are and how they follow on."""
        self._identities = identities
        self._token_ids = token_ids

    def cleared(self) -> list[Event]:
        """What a stream begins with: whatever a reader thought there was, is gone."""
        self._identities.cleared()
        return [{"type": "AllBlocksCleared"}]

    def snapshot(self, blocks: Iterable[tuple[Key, StoredBlock]]) -> Iterator[list[Event]]:
        """Batches that store these blocks, in this order."""
        chain: _Chain | None = None
        events: list[Event] = []
        tokens = 0
        for key, block in blocks:
            identity = self._identities.stored(key, block.parent)
            if tokens and tokens + len(block.token_ids) > MAX_BATCH_TOKENS:
                yield events
                events, chain, tokens = [], None, 0
            if chain is None or not chain.goes_on(key, block, identity):
                chain = _Chain(key, block, identity)
                events.append(chain.event)
            chain.add(key, block, identity, self._token_ids)
            tokens += len(block.token_ids)
        if events:
            yield events

    def changed(self, diff: Diff) -> Iterator[list[Event]]:
        """Batches that make one border's tables those of the next. What is removed comes first: readers that do not
        tell the tiers apart then keep a block that moved from one to the other.
        """
        events = self.cleared() if diff.cleared else []
        for tier in Tier:
            digests = [key[1] for key, block in diff.changes.items() if block is None and key[0] is tier]
            for start in range(0, len(digests), MAX_BATCH_TOKENS):
                hashes = [short_hash(digest) for digest in digests[start : start + MAX_BATCH_TOKENS]]
                removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM[tier], "group_idx": _GROUP}
                events.append(removed)
        stored = self.snapshot((key, block) for key, block in diff.changes.items() if block is not None)
        first = next(stored, None)
        if events or first:
            yield events + (first or [])
        yield from stored
        self._identities.removed(key for key, block in diff.changes.items() if block is None)


class _Chain:
    """One BlockStored: blocks of one tier that follow one another."""

    def __init__(self, key: Key, block: StoredBlock, identity: BlockIdentity) -> None:
        self._next = key[0], block.parent
        self._adapter = identity.adapter_id
        self.event: Event = {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": None if identity.first else short_hash(block.parent),
            "token_ids": [],
            "block_size": len(block.token_ids),
            "lora_id": None,
            "medium": _MEDIUM[key[0]],
            "lora_name": identity.adapter_id or None,
            "extra_keys": [],
            "group_idx": _GROUP,
            "kv_cache_spec_kind": _KIND,
        }

    def goes_on(self, key: Key, block: StoredBlock, identity: BlockIdentity) -> bool:
        """Whether the block follows the last one."""
        return self._next == (key[0], block.parent) and self._adapter == identity.adapter_id

    def add(self, key: Key, block: StoredBlock, identity: BlockIdentity, token_ids: bool) -> None:
        """The block is the next of the event."""
        self._next = key
        self.event["block_hashes"].append(short_hash(key[1]))
        self.event["extra_keys"].append(_extra_keys(identity))
        if token_ids:
            self.event["token_ids"] += block.token_ids


def _extra_keys(identity: BlockIdentity) -> list[Any] | None:
    """What besides tokens and parent made the block's hash, as vLLM has it: the adapter, each medium with its place,
    and in the first block of a chain the namespace, which is vLLM's cache salt.
    """
    keys: list[Any] = [identity.adapter_id] if identity.adapter_id else []
    keys += [[digest, start] for start, digest in identity.media]
    if identity.first and identity.namespace:
        keys.append(identity.namespace)
    return keys or None


def pack(seconds: float, events: list[Event]) -> bytes:
    """A batch as it is sent."""
    packed: bytes = msgpack.packb([seconds, events, _RANK], default=_as_list)
    return packed


def _as_list(ids: Any) -> list[int]:
    if isinstance(ids, array):
        return ids.tolist()
    raise TypeError(f"an event cannot hold a {type(ids).__name__}")
