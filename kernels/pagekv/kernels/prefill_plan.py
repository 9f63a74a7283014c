"""Work items of the prefill kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]

TILE_ROWS = 64
"""Rows of the query tile of one thread block: pairs of a token and a query head of the KV head's group."""


def prefill_items(query_start: Ints, context_lens: Ints, sequences: Ints, group_size: int) -> Ints:
    """[n, 4] of the given sequences: sequence, first query of the tile (counted within the sequence), 0, 0.

    Tiles with the most keys come first, so that short ones fill the gaps at the end.
    """
    tokens = max(TILE_ROWS // group_size, 1)
    counts = query_start[sequences + 1] - query_start[sequences]
    tiles = -(-counts // tokens)
    owner = np.repeat(np.arange(len(sequences)), tiles)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    items = np.zeros((len(owner), 4), np.int32)
    items[:, 0] = sequences[owner]
    items[:, 1] = nth * tokens
    keys = context_lens[items[:, 0]] - counts[owner] + items[:, 1]
    return items[np.argsort(-keys, kind="stable")]
