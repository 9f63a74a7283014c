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

    def beginning(self) -> list[Event]:
        """What a stream begins with: whatever a reader thought there was, is gone."""
        return [{"type": "AllBlocksCleared"}]

    def snapshot(self, blocks: Iterable[tuple[Key, StoredBlock]]) -> Iterator[list[Event]]:
        """Batches that store these blocks, in this order."""
        identify, with_tokens = self._identities.stored, self._token_ids
        events: list[Event] = []
        # Tokens in the batch; the block that the last event ends with, and its adapter.
        tokens, end, of = 0, None, ""
        for key, block in blocks:
            (tier, digest), (parent, token_ids) = key, block
            size = len(token_ids)
            if tokens and tokens + size > MAX_BATCH_TOKENS:
                yield events
                events, tokens, end = [], 0, None
            _, adapter, first, media = identity = identify(key, parent)
            extra_keys = _extra_keys(identity) if adapter or media or first else None
            if end == (tier, parent) and of == adapter:
                # One event of blocks that follow one another.
                event = events[-1]
                event["block_hashes"].append(short_hash(digest))
                event["extra_keys"].append(extra_keys)
                if with_tokens:
                    event["token_ids"] += token_ids
            else:
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [short_hash(digest)],
                        "parent_block_hash": None if first else short_hash(parent),
                        "token_ids": token_ids.tolist() if with_tokens else [],
                        "block_size": size,
                        "lora_id": None,
                        "medium": _MEDIUM[tier],
                        "lora_name": adapter or None,
                        "extra_keys": [extra_keys],
                        "group_idx": _GROUP,
                        "kv_cache_spec_kind": _KIND,
                    }
                )
            tokens, end, of = tokens + size, key, adapter
        if events:
            yield events

    def changed(self, diff: Diff) -> Iterator[list[Event]]:
        """Batches that make one border's tables those of the next. What is removed comes first: readers that do not
        tell the tiers apart then keep a block that moved from one to the other.
        """
        events: list[Event] = []
        if diff.cleared:
            self._identities.cleared()
            events = self.beginning()
        gone = [key for key, block in diff.changes.items() if block is None]
        for tier in Tier if gone else ():
            digests = [digest for of, digest in gone if of is tier]
            for start in range(0, len(digests), MAX_BATCH_TOKENS):
                hashes = [short_hash(digest) for digest in digests[start : start + MAX_BATCH_TOKENS]]
                removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM[tier], "group_idx": _GROUP}
                events.append(removed)
        stored = self.snapshot((key, block) for key, block in diff.changes.items() if block is not None)
        first = next(stored, None)
        if events or first:
            yield events + (first or [])
        yield from stored
        self._identities.removed(gone)


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
    packed: bytes = msgpack.packb([seconds, events, _RANK])
    return packed
