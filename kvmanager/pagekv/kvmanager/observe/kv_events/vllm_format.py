"""Changes of the prefix tables as vLLM's KV events, which routers and cache indexers read: maps with a `type`, packed
as msgpack `[seconds since 1970, [event, ...], data parallel rank]`.

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys,
                      group_idx, kv_cache_spec_kind
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Fields and their order are those of `vllm/distributed/kv_events.py` in vLLM 0.33, which readers that decode by position
or refuse unknown keys need. Hashes are the first 64 bits of the digests. A parent of null begins a chain. `medium` is
GPU for the device's pool, whatever the device is, and CPU for the host's, because readers know no other words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np

from pagekv.kvmanager.kvcache.block_hash import TOKEN_BYTES, CacheIdentity, MediaKeys, media_keys, short_hashes
from pagekv.kvmanager.kvcache.events.batch import Diff, Key, Stored, Tier, join

# Tokens in one batch at most, so that no batch takes the event loop for long or exceeds some hundreds of kilobytes.
MAX_BATCH_TOKENS = 16_384
_MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
# All layers are one group, and every block holds all of its tokens' keys and values.
_GROUP = 0
_KIND = "full_attention"
_RANK = 0
_CLEARED: bytes = msgpack.packb({"type": "AllBlocksCleared"})
# Chain roots, and blocks with media, that are remembered: some megabytes.
MAX_ROOTS = 65_536
MAX_MEDIA_BLOCKS = 65_536
_Known = TypeVar("_Known")


class BlockExtraKeys(NamedTuple):
    """The extra keys of one block; `first` of its chain, where its parent is the root, which is no block."""

    namespace: str = ""
    adapter_id: str = ""
    first: bool = False
    # Media that overlap the block: where each starts relative to the block, and its digest.
    media: tuple[tuple[int, str], ...] = ()

    def packed(self) -> list[Any] | None:
        """In vLLM's form: the adapter, each medium with its place, and in the first block of a chain the namespace,
        which is vLLM's cache salt.
        """
        keys: list[Any] = [self.adapter_id] if self.adapter_id else []
        keys += [[digest, start] for start, digest in self.media]
        if self.first and self.namespace:
            keys.append(self.namespace)
        return keys or None


_NOBODYS = "", ""
# Blocks with no extra keys; always this object.
PLAIN = BlockExtraKeys()


class ExtraKeys:
    """Namespace, adapter and media of the blocks in the tables, from the requests that come and the tables' changes
    that are read.

    A block is known by its digest, which covers the extra keys without naming them. Requests bring extra keys, and a
    block has its parent's: at every step boundary the parent of a block that enters the device's table is there, and
    blocks of the host pool have been on the device. Blocks of no namespace, adapter and media cost nothing.
    """

    def __init__(self) -> None:
        self._roots: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._media: OrderedDict[bytes, MediaKeys] = OrderedDict()
        # Namespace and adapter of the blocks in the tables that have any.
        self._of: dict[Key, tuple[str, str]] = {}

    def note_request(self, root: bytes, identity: CacheIdentity) -> None:
        """Notes a request whose chains begin with the digest `root`."""
        _remember(self._roots, root, (identity.namespace, identity.adapter_id), MAX_ROOTS)

    def note_media(self, digests: Sequence[bytes], block_size: int, identity: CacheIdentity) -> None:
        """Notes the full blocks of a sequence that carries media."""
        for index, digest in enumerate(digests):
            keys = media_keys(identity.media, index * block_size, (index + 1) * block_size)
            if keys:
                _remember(self._media, digest, keys, MAX_MEDIA_BLOCKS)

    def stored(self, tier: Tier, digests: Sequence[bytes], parents: Sequence[bytes]) -> list[BlockExtraKeys]:
        """Extra keys of blocks that entered a table; on the device parents come first."""
        if not self._of and not self._media and self._roots.keys().isdisjoint(parents):
            return [PLAIN] * len(digests)
        return [self._stored((tier, digest), parent) for digest, parent in zip(digests, parents, strict=True)]

    def _stored(self, key: Key, parent: bytes) -> BlockExtraKeys:
        root, of = self._roots.get(parent), self._of
        whose = root or of.get((Tier.DEVICE, parent)) or of.get((Tier.HOST, parent)) or _NOBODYS
        if whose != _NOBODYS:
            of[key] = whose
        keys = BlockExtraKeys(*whose, root is not None, tuple(self._media.get(key[1], ())))
        return PLAIN if keys == PLAIN else keys

    def removed(self, tier: Tier, digests: Iterable[bytes]) -> None:
        """Removes blocks that left a table; to be called after `stored` of the same batch."""
        if self._of:
            for digest in digests:
                self._of.pop((tier, digest), None)

    def cleared(self) -> None:
        """Removes all blocks: both tables are empty."""
        self._of.clear()


def _remember(known: OrderedDict[bytes, _Known], key: bytes, value: _Known, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


class Events(NamedTuple):
    """Packed events, one after the other."""

    number: int
    packed: bytes | bytearray


# The first batch of a stream: all blocks that a reader knew of are gone.
BEGINNING = Events(1, _CLEARED)


class KvEventFormat:
    """Turns changes into batches of packed events."""

    def __init__(self, extra_keys: ExtraKeys) -> None:
        self._known = extra_keys

    def snapshot(self, found: Sequence[Stored]) -> Iterator[Events]:
        """Batches that store these blocks, those of a tier in this order."""
        for tier in Tier:
            of_tier = [stored for stored in found if stored.tier is tier]
            if of_tier:
                blocks = join(of_tier)
                most = max(1, MAX_BATCH_TOKENS * TOKEN_BYTES * len(blocks.digests) // len(blocks.tokens))
                for start in range(0, len(blocks.digests), most):
                    yield self._stored(blocks.cut(start, start + most))

    def changed(self, diff: Diff) -> Iterator[Events]:
        """Batches that turn the tables of one step boundary into those of the next. Removals come first: readers that
        do not tell the tiers apart then keep a block that moved from one to the other.
        """
        count, packed = 0, bytearray()
        if diff.cleared:
            self._known.cleared()
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
        for tier, digests in diff.removed:
            self._known.removed(tier, digests)

    def _stored(self, blocks: Stored) -> Events:
        """Events that store these blocks; a run of blocks, each the parent of the next, is one event."""
        tier, digests, parents = blocks.tier, blocks.digests, blocks.parents
        count = len(digests)
        ids = np.frombuffer(blocks.tokens, np.uint32).reshape(count, -1)
        size = ids.shape[1]
        names = self._known.stored(tier, digests, parents)
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
    """A packed event of one block of `size` tokens with a parent, every number at its widest; and where fields are."""
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
