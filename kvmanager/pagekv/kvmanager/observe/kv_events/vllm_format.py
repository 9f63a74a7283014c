"""Changes of the prefix tables as vLLM's KV events, which routers and cache indexers read. Events are maps with a
`type`; a batch is packed as msgpack `[seconds since 1970, [event, ...], data parallel rank]`.

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys,
                      group_idx, kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Fields and their order are those of `vllm/distributed/kv_events.py` in vLLM 0.33, because some readers decode by
position or refuse unknown keys. Hashes are the first 64 bits of the digests. A parent of null begins a chain. `medium`
is GPU for the device pool, whatever the device is, and CPU for the host pool, because readers know no other words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import msgpack
import numpy as np

from pagekv.kvmanager.kvcache.block_hash import TOKEN_BYTES, CacheIdentity, MediaKeys, media_keys, short_hashes
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored, Tier, join

# Most tokens in one batch, so that no batch holds up the event loop for long or exceeds some hundreds of kilobytes.
MAX_BATCH_TOKENS = 16_384
_MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
# All layers are in one group, and a block has the keys and values of all its tokens.
_GROUP = 0
_KIND = "full_attention"
_RANK = 0
_CLEARED: bytes = msgpack.packb({"type": "AllBlocksCleared"})
# Blocks with media that are remembered: some megabytes.
MAX_MEDIA_BLOCKS = 65_536


class BlockExtraKeys(NamedTuple):
    """The extra keys of one block. `first`: the block is the first of its chain; its parent, the root, is no block."""

    namespace: str = ""
    adapter_id: str = ""
    first: bool = False
    # Media that overlap the block: the start of each relative to the block, and its digest.
    media: tuple[tuple[int, str], ...] = ()

    def packed(self) -> list[Any] | None:
        """The extra keys in vLLM's form: the adapter, each medium with its place and, for the first block of a chain,
        the namespace as vLLM's cache salt.
        """
        keys: list[Any] = [self.adapter_id] if self.adapter_id else []
        keys += [[digest, start] for start, digest in self.media]
        if self.first and self.namespace:
            keys.append(self.namespace)
        return keys or None


# The extra keys of a block without any; always this object.
PLAIN = BlockExtraKeys()


class MediaKeysOf:
    """The media in blocks, by the blocks' digests, for the latest MAX_MEDIA_BLOCKS blocks with media. The media come
    from requests, because a digest covers media without naming them. Blocks without media cost nothing.
    """

    def __init__(self) -> None:
        self._media: OrderedDict[bytes, MediaKeys] = OrderedDict()

    def note(self, digests: Sequence[bytes], block_size: int, identity: CacheIdentity) -> None:
        """Notes the full blocks of a sequence that carries media."""
        for index, digest in enumerate(digests):
            keys = media_keys(identity.media, index * block_size, (index + 1) * block_size)
            if keys:
                self._media[digest] = keys
                self._media.move_to_end(digest)
                if len(self._media) > MAX_MEDIA_BLOCKS:
                    self._media.popitem(last=False)

    def __bool__(self) -> bool:
        return bool(self._media)

    def get(self, digest: bytes) -> MediaKeys:
        """The media of a block: the start of each relative to the block, and its digest."""
        return self._media.get(digest, [])


class Events(NamedTuple):
    """Packed events, one after the other."""

    number: int
    packed: bytes | bytearray


# The first batch of a stream: all blocks that a reader knew of are gone.
BEGINNING = Events(1, _CLEARED)


class KvEventFormat:
    """Turns changes into batches of packed events."""

    def __init__(self, media: MediaKeysOf) -> None:
        self._media = media

    def snapshot(self, found: Sequence[Stored]) -> Iterator[Events]:
        """Batches that store these blocks, tier by tier, those of a tier in this order."""
        for tier in Tier:
            of_tier = [stored for stored in found if stored.tier is tier]
            if of_tier:
                blocks = join(of_tier)
                # Whether each block begins a chain, which the joined blocks do not say.
                firsts = [stored.first and not place for stored in of_tier for place in range(len(stored.digests))]
                most = max(1, MAX_BATCH_TOKENS * TOKEN_BYTES * len(blocks.digests) // len(blocks.tokens))
                for start in range(0, len(blocks.digests), most):
                    yield self._stored(blocks.cut(start, start + most), firsts[start : start + most])

    def changed(self, diff: Diff) -> Iterator[Events]:
        """Batches that turn the tables of one step boundary into those of the next. Removals come first, so that
        readers that do not distinguish tiers keep a block that moved from one tier to the other.
        """
        count, packed = 0, bytearray()
        if diff.cleared:
            count, packed = 1, packed + _CLEARED
        for tier in Tier if diff.removed else ():
            gone = [*chain.from_iterable(removed.digests for removed in diff.removed if removed.tier is tier)]
            for start in range(0, len(gone), MAX_BATCH_TOKENS):
                hashes = short_hashes(gone[start : start + MAX_BATCH_TOKENS]).tolist()
                removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM[tier], "group_idx": _GROUP}
                count, packed = count + 1, packed + msgpack.packb(removed)
        for events in self.snapshot(diff.stored):
            yield Events(count + events.number, packed + events.packed) if count else events
            count = 0
        if count:
            yield Events(count, packed)

    def _stored(self, blocks: Stored, firsts: Sequence[bool]) -> Events:
        """Events that store these blocks. A run of blocks, each the parent of the next, is one event."""
        tier, digests, parents = blocks.tier, blocks.digests, blocks.parents
        count = len(digests)
        ids = np.frombuffer(blocks.tokens, np.uint32).reshape(count, -1)
        size = ids.shape[1]
        names = self._extra_keys(blocks, firsts)
        hashes, before = short_hashes(digests), short_hashes(parents)
        single, fields = _single(tier, size)
        singles = bytearray(single) * count
        rows = np.frombuffer(singles, fields)
        rows["hash"], rows["parent"], rows["tokens"]["id"] = hashes, before, ids
        follows = before[1:] == hashes[:-1]
        if names.count(PLAIN) == count and not follows.any():
            return Events(count, singles)
        begins = [
            place
            for place in range(1, count)
            if not follows[place - 1] or names[place].adapter_id != names[place - 1].adapter_id
        ]
        packed: list[bytes | bytearray] = []
        for begin, end in pairwise([0, *begins, count]):
            if end - begin == 1 and names[begin] is PLAIN:
                packed.append(singles[begin * len(single) : end * len(single)])
            else:
                here = hashes[begin:end].tolist(), None if names[begin].first else int(before[begin])
                packed.append(_pack_stored(tier, *here, ids[begin:end].ravel().tolist(), size, names[begin:end]))
        return Events(len(packed), b"".join(packed))

    def _extra_keys(self, blocks: Stored, firsts: Sequence[bool]) -> list[BlockExtraKeys]:
        if blocks.names is None and not self._media and not any(firsts):
            return [PLAIN] * len(firsts)
        found = []
        for digest, names, first in zip(blocks.digests, blocks.names or repeat(None), firsts, strict=False):
            keys = BlockExtraKeys(*(names or ("", "")), first, tuple(self._media.get(digest)))
            found.append(PLAIN if keys == PLAIN else keys)
        return found


def _pack_stored(
    tier: Tier, hashes: list[int], parent: int | None, token_ids: list[int], size: int, names: list[BlockExtraKeys]
) -> bytes:
    packed: bytes = msgpack.packb(
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": token_ids,
            "block_size": size,
            "lora_id": None,
            "medium": _MEDIUM[tier],
            "lora_name": names[0].adapter_id or None,
            "extra_keys": [block.packed() for block in names],
            "group_idx": _GROUP,
            "kv_cache_spec_kind": _KIND,
        }
    )
    return packed


@lru_cache
def _single(tier: Tier, size: int) -> tuple[bytes, np.dtype[np.void]]:
    """A packed event of one block with a parent, all numbers in their longest form; and the places of its fields."""
    most = 2**64 - 1
    event = _pack_stored(tier, [most], most - 1, [2**32 - 1] * size, size, [PLAIN])
    # A token id behind msgpack's type byte.
    token = np.dtype({"names": ["id"], "formats": [">u4"], "offsets": [1], "itemsize": 1 + TOKEN_BYTES})
    tokens = msgpack.packb([2**32 - 1] * size)
    fields = {
        "hash": (">u8", event.index(most.to_bytes(8, "big"))),
        "parent": (">u8", event.index((most - 1).to_bytes(8, "big"))),
        "tokens": ((token, (size,)), event.index(tokens) + len(tokens) - token.itemsize * size),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    return event, np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": len(event)})


def pack(seconds: float, events: Events) -> bytes:
    """A batch as it is sent."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(3)
    packer.pack(seconds)
    packer.pack_array_header(events.number)
    return b"".join((packer.bytes(), events.packed, msgpack.packb(_RANK)))
