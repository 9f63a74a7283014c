"""Work items of the prefill kernel, and the sizes of its tiles (`src/prefill_tile.cuh` has the same figures)."""

from __future__ import annotations

import numpy as np

from pagekv.kernels.decode_plan import Ints, KernelTile, padded_row
from pagekv.kernels.variants import Variant

WARPS = 4


def prefill_tile(variant: Variant) -> KernelTile:
    """The tile of a variant's prefill kernel."""
    large, fp32 = variant.head_size > 128, variant.dtype == "float32"
    fp8 = variant.kv_element_bytes == 1
    rows = WARPS * ((4 if large else 8) if fp32 else (16 if large else 32))
    keys = 32 if fp32 or large else 64
    stages = 2 if fp32 else 3
    row_bytes = padded_row(variant.head_size * variant.element_bytes)
    slot_bytes = keys * (variant.head_size if fp8 else row_bytes)
    shared = rows * row_bytes + stages * slot_bytes  # queries, ring of key and value tiles
    shared += 2 * keys * row_bytes if fp8 else 0  # widened tiles
    shared += 2 * keys * 8 + 32 + rows * 4  # addresses of keys, the range of keys, positions of rows
    shared += rows * keys * 4 if fp32 else 0  # weights
    return KernelTile(keys, rows, WARPS * 32, shared)


def prefill_items(
    query_start: Ints, context_lens: Ints, sequences: Ints, *, group_size: int, tile: KernelTile, window: int = 0
) -> Ints:
    """[n, 4]: sequence, first row of the tile (query of the sequence * group_size + head of the group), 0, 0.

    `sequences`: indices of the sequences to prefill, an item for each tile of their rows. Items that walk the most keys
    come first, so that thread blocks that start last are short. `window`: of the layer (0: none), for the order alone.
    """
    counts = query_start[sequences + 1] - query_start[sequences]
    rows = counts * group_size
    tiles = -(-rows // tile.rows)
    owner = np.repeat(np.arange(len(sequences)), tiles)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile.rows
    past = (context_lens[sequences] - counts)[owner]
    last_key = past + (np.minimum(first + tile.rows, rows[owner]) - 1) // group_size
    first_key = np.maximum(past + first // group_size - window + 1, 0) if window else np.zeros_like(last_key)
    walked = last_key // tile.keys - first_key // tile.keys
    items = np.zeros((len(owner), 4), np.int32)
    items[:, 0] = sequences[owner]
    items[:, 1] = first
    return items[np.argsort(-walked, kind="stable")]
