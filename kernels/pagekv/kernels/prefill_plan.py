"""Work items of the prefill kernel, and the sizes of its tiles (`src/prefill_tile.cuh` has the same figures)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pagekv.kernels.decode_plan import KernelTile, padded_row
from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRule, oldest_visible, partial_bytes, repeated, row_merges
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import Variant

WARPS = 4
NONE = np.zeros((0, 4), np.int32)
"""No items, or no merges."""


def prefill_tile(variant: Variant) -> KernelTile:
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


def wgmma_tile(variant: Variant) -> KernelTile:
    """The tile of the kernel that multiplies by warpgroups (`src/prefill_wgmma.cuh`); its rows are those of
    `prefill_tile`."""
    rows = keys = 128
    shared = 5 * rows * variant.head_size * variant.element_bytes  # queries, two tiles each of keys and values
    shared += rows * 4 + 10 * 8  # positions of rows, barriers
    return KernelTile(keys, rows, 3 * 128, -(-shared // 1024) * 1024)


@dataclass(frozen=True)
class PrefillWork:
    """Items of a step's prompts, as two lists. A layer's window decides which of them the layer computes."""

    items: Ints
    """[n, 4]: sequence, first row of the tile (query of the sequence * group_size + head of the group), number of rows,
    0. Every row is in one item, which walks all its keys."""
    split_items: Ints
    """[s, 4], empty if no row is split: as `items`, but a row that is split is in one item for each of its splits. The
    last word of such an item is the split, in units of its own length, with log2 of that length in the bits from 24
    on."""
    merges: Ints
    """`prefill_splits.row_merges`; [0, 4] if no row is split."""
    num_partials: int

    @property
    def walks(self) -> int:
        """Thread blocks of each KV head in a layer that splits."""
        return len(self.split_items) or len(self.items)

    def partial_bytes(self, num_heads: int, head_size: int) -> int:
        """Bytes of all partial results of one layer, each written once and read once."""
        return self.num_partials * partial_bytes(num_heads, head_size)


def prefill_work(
    query_start: Ints,
    context_lens: Ints,
    sequences: Ints,
    *,
    group_size: int,
    tile: KernelTile,
    window: int = 0,
    rule: SplitRule = SPLIT_RULE,
) -> PrefillWork:
    """Items of the rows of `sequences`, which are ascending indices. Items that walk the most keys come first, so that
    thread blocks that start last are short.

    `window`: the widest of any layer; 0: none.
    """
    if not len(sequences):
        return PrefillWork(NONE, NONE, NONE, 0)
    counts = query_start[sequences + 1] - query_start[sequences]
    past = context_lens[sequences] - counts
    visible = int(context_lens[sequences].max())
    runs = _runs(past, counts, rule.classes(min(visible, window or visible)))
    tiles = _Tiles.of(runs, past, group_size, tile, window)
    items, split = tiles.items(sequences)[tiles.heaviest_first(tile)], runs[runs[:, 3] > 0]
    if not len(split):
        return PrefillWork(items, NONE, NONE, 0)
    merges = row_merges(split, past, query_start[sequences], window, int(query_start[-1]))
    num_partials = int((merges[:, 1] + merges[:, 2]).max())
    return PrefillWork(items, tiles.of_splits(sequences, tile), merges, num_partials)


@dataclass(frozen=True)
class _Tiles:
    """Tiles of rows, each of one sequence and one length of splits. [n] each."""

    place: Ints
    """Index of the sequence among those that are planned."""
    first: Ints
    rows: Ints
    log2: Ints
    """Log2 of the length of splits; 0: the rows are not split."""
    oldest: Ints
    """First position that any row sees."""
    last: Ints
    """Last position that any row sees."""

    @classmethod
    def of(cls, runs: Ints, past: Ints, group_size: int, tile: KernelTile, window: int) -> _Tiles:
        """`runs` [r, 4]: place, first query, end query, log2."""
        begin, end = runs[:, 1] * group_size, runs[:, 2] * group_size
        run, number = repeated(-(-(end - begin) // tile.rows))
        first = begin[run] + number * tile.rows
        rows = np.minimum(tile.rows, end[run] - first)
        before = past[runs[run, 0]]
        oldest = oldest_visible(before + first // group_size, window)
        last = before + (first + rows - 1) // group_size
        return cls(runs[run, 0], first, rows, runs[run, 3], oldest, last)

    def items(self, sequences: Ints) -> Ints:
        """[n, 4]: as `PrefillWork.items`, in the order of the tiles."""
        words = [sequences[self.place], self.first, self.rows, np.zeros_like(self.first)]
        return np.stack(words, axis=1).astype(np.int32)

    def heaviest_first(self, tile: KernelTile) -> Ints:
        """[n]: indices of the tiles, those that walk the most keys first."""
        return np.argsort(self.oldest // tile.keys - self.last // tile.keys, kind="stable").astype(np.int32)

    def of_splits(self, sequences: Ints, tile: KernelTile) -> Ints:
        """[s, 4]: as `PrefillWork.split_items`."""
        # A tile of whole rows is one split, longer than any context.
        log2 = np.where(self.log2 > 0, self.log2, 62).astype(np.int64)
        first_split = self.oldest >> log2
        # Rows that see no key have an item, too, which writes zeros.
        of, number = repeated(np.maximum((self.last >> log2) - first_split + 1, 1))
        split = first_split[of] + number
        begin = np.maximum(split << log2[of], self.oldest[of])
        last = np.minimum(((split + 1) << log2[of]) - 1, self.last[of])
        # Neighbouring items have the same split, so that all but the first find its keys in the cache.
        order = np.lexsort((split, begin // tile.keys - last // tile.keys))
        items = self.items(sequences)[of]
        items[:, 3] = split | self.log2[of] << 24
        return items[order]


def _runs(past: Ints, counts: Ints, classes: list[tuple[int, int]]) -> Ints:
    """[r, 4]: place, first query, end query, log2 of splits: the queries of each sequence by class of `SplitRule`, in
    order."""
    if len(classes) == 1:
        rows = np.flatnonzero(counts).astype(np.int32)
        return np.stack([rows, np.zeros_like(rows), counts[rows], np.zeros_like(rows)], axis=1)
    # A query at position p sees p + 1 keys; at position -1 it sees none.
    edges = [-(1 << 31), *(least - 1 for least, _ in classes[1:]), 1 << 31]
    found = []
    for (low, high), (_, log2) in zip(pairwise(edges), classes, strict=True):
        first, end = (np.clip(edge - past.astype(np.int64), 0, counts) for edge in (low, high))
        some = np.flatnonzero(end > first)
        found.append(np.stack([some, first[some], end[some], np.full_like(some, log2)], axis=1))
    runs = np.concatenate(found).astype(np.int32)
    return runs[np.lexsort((runs[:, 1], runs[:, 0]))]
