"""Namespace, adapter and media of blocks, which event formats name beside the tokens: vLLM's extra keys.

A block is known by its digest, which covers the extra keys without naming them. Requests bring extra keys, and a block
has its parent's: at every step boundary the parent of a block that enters the device's table is there, and blocks of
the host pool have been on the device. Blocks of no namespace, adapter and media cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaKeys, media_keys
from pagekv.kvmanager.kvcache.events.batch import Key, Tier

# Chain roots, and blocks with media, that are remembered: some megabytes.
MAX_ROOTS = 65_536
MAX_MEDIA_BLOCKS = 65_536


class BlockExtraKeys(NamedTuple):
    """The extra keys of one block; `first` of its chain, where its parent is the root, which is no block."""

    namespace: str = ""
    adapter_id: str = ""
    first: bool = False
    # Media that overlap the block: where each starts relative to the block, and its digest.
    media: tuple[tuple[int, str], ...] = ()


_NOBODYS = "", ""
# Blocks with no extra keys; always this object.
PLAIN = BlockExtraKeys()


class ExtraKeys:
    """Extra keys of the blocks in the tables, from the requests that come and the tables' changes that are read."""

    def __init__(self) -> None:
        self._roots: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._media: OrderedDict[bytes, MediaKeys] = OrderedDict()
        # Namespace and adapter of the blocks in the tables that have any.
        self._of: dict[Key, tuple[str, str]] = {}

    def note_request(self, root: bytes, identity: CacheIdentity) -> None:
        """Notes a request whose chains begin with the digest `root`."""
        self._roots[root] = identity.namespace, identity.adapter_id
        self._roots.move_to_end(root)
        if len(self._roots) > MAX_ROOTS:
            self._roots.popitem(last=False)

    def note_media(self, digests: Sequence[bytes], block_size: int, identity: CacheIdentity) -> None:
        """Notes the full blocks of a sequence that carries media."""
        for index, digest in enumerate(digests):
            keys = media_keys(identity.media, index * block_size, (index + 1) * block_size)
            if keys:
                self._media[digest] = keys
                self._media.move_to_end(digest)
        while len(self._media) > MAX_MEDIA_BLOCKS:
            self._media.popitem(last=False)

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
