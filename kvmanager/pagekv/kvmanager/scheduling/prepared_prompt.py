"""Preparation of a long prompt: the work that grows with its length, done in slices before the scheduler gets the
request (DESIGN 6).

The scheduler decides about a prepared request as about any other, only faster. Nothing is left to hash. Cached blocks
that preparation found are used as they are; if blocks have left the table since, they are compared with the prompt in a
few vector operations instead of one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagekv.kvmanager.kvcache.block_hash import MediaSpan, chain_digests
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens, PrefixTable

# Bounds of a slice. 1,024 hashes take 0.7 to 2 ms, and packing token ids for a message about 0.1 microseconds each.
SLICE_BLOCKS = 1024
SLICE_TOKENS = 16_384
# So many media double the time that a block takes, because each block is compared with every medium.
_MEDIA_A_BLOCK = 8


def slice_blocks(block_size: int, num_media: int) -> int:
    """Blocks in one slice of a prompt with so many media."""
    return max(1, min(SLICE_BLOCKS, SLICE_TOKENS // block_size) // (1 + num_media // _MEDIA_A_BLOCK))


@dataclass(slots=True)
class PreparedPrompt:
    """Everything that can be computed from a prompt without a decision. Valid whatever happens to the prefix table."""

    # Parent digest of the first block: 32 bytes.
    root: bytes
    # Digests of the full blocks.
    digests: list[bytes] = field(default_factory=list)
    # A hint: cached blocks that held the leading tokens when they were looked up. Blocks may be evicted at any time,
    # but none has left if the table still has this `generation`, its generation before the first lookup.
    cached: Blocks = field(default_factory=lambda: np.empty(0, np.int32))
    generation: object | None = None
    # All token ids, uint32, copied for the sequence; and packed for the message of a step.
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    packed: bytes = b""

    def slices(
        self,
        token_ids: array[int],
        media: Sequence[MediaSpan],
        table: PrefixTable,
        pack: Callable[[array[int]], bytes] | None,
    ) -> Iterator[None]:
        """Fills an empty PreparedPrompt. The iterator handles at most `slice_blocks` blocks before each item; the table
        may change between two items. `pack` encodes token ids for a message, as bytes that can be concatenated; None:
        token ids are neither packed nor copied.
        """
        size = table.block_size
        stride = slice_blocks(size, len(media)) * size
        text = min((span.position for span in media), default=len(token_ids)) // size
        packed: list[bytes] = []
        self.generation = table.generation
        for start in range(0, len(token_ids), stride):
            part = token_ids[start : start + stride]
            if pack is not None:
                self.token_ids.extend(part)
                packed.append(pack(part))
            full = np.frombuffer(part, np.uint32)[: len(part) // size * size].reshape(-1, size)
            self._identify(full, media, table, max(0, text - start // size))
            yield
        self.packed = b"".join(packed)

    def _identify(self, tokens: BlockTokens, media: Sequence[MediaSpan], table: PrefixTable, text: int) -> None:
        """Adds the digests of the next blocks, [n, block_size], of which the first `text` have no media. Leading blocks
        that are cached get their digests from the table; the others are hashed.
        """
        begin = len(self.digests)
        node = int(self.cached[-1]) if len(self.cached) else self.root
        # The latest block may have been evicted and its id reused, even by a block with an equal digest.
        if len(self.cached) == begin and (not begin or table.digest(int(node)) is self.digests[-1]):
            hits = table.trie.match(node, tokens[:text])
            self.digests += table.digests(hits)
            self.cached = np.concatenate([self.cached, np.array(hits, np.int32)])
        found = len(self.digests) - begin
        if found < len(tokens):
            parent = self.digests[-1] if self.digests else self.root
            raw, first = tokens[found:].tobytes(), len(self.digests)
            self.digests += chain_digests(parent, raw, table.block_size, media, first)
