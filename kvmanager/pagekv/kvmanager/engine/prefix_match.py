"""The cached prefix of a prompt, as lookups, explanations and pins see it. Changes nothing but the alarm counter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt


class PrefixMatch(NamedTuple):
    """A prompt compared with the prefix table as it is now."""

    # [tokens of the prompt].
    tokens: NDArray[np.uint32]
    # Token ids of its full blocks, [n, block_size].
    chunks: BlockTokens
    # Digests of the full blocks, [n].
    digests: list[bytes]
    # The cached blocks that hold the leading full blocks.
    hits: Blocks


def match_prefix(
    pool: BlockPool,
    root: bytes,
    token_ids: Sequence[int],
    media: Sequence[MediaSpan],
    prepared: PreparedPrompt | None,
) -> PrefixMatch:
    """`root`: the parent digest of the first block. `prepared`: the same prompt, prepared; the table may have changed
    since. Without it, the prompt is prepared here, all at once.
    """
    size, table = pool.block_size, pool.table
    if prepared is None or prepared.root != root:
        prepared = PreparedPrompt(root)
        ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        for _ in prepared.slices(ids, media, table, None):
            pass
    tokens: NDArray[np.uint32] = np.asarray(token_ids, np.uint32)
    chunks = tokens[: len(tokens) // size * size].reshape(-1, size)
    known = table.trie.verify(root, prepared.cached, chunks)
    before = int(prepared.cached[known - 1]) if known else root
    more = pool.match(before, prepared.digests[known:], chunks[known:])
    return PrefixMatch(tokens, chunks, prepared.digests, np.append(prepared.cached[:known], np.array(more, np.int32)))
