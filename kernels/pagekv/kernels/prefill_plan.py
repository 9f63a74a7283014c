"""Work items of the prefill kernels, and the sizes of their tiles (`src/prefill_tile.cuh` has the same figures)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pagekv.kernels.decode_plan import Ints, KernelTile, padded_row
from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRows, SplitRule, oldest_visible, partial_bytes, repeated
from pagekv.kernels.variants import Variant

WARPS = 4
NONE = np.zeros((0, 4), np.int32)
"""No items, or no merges."""


def prefill_tile(variant: Variant) -> KernelTile:
    """The tile of a variant's prefill kernels."""
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


@dataclass(frozen=True)
class PrefillPass:
    """Split rows whose partial results are in memory at the same time."""

    first_item: int
    num_items: int
    first_row: int
    """Of the step; the rows from here on may have some between them that are not split."""
    num_rows: int


@dataclass(frozen=True)
class PrefillWork:
    """Items of a step's prompts: every row in one item that walks all its keys, and, where it is split, in an item for
    each split besides. A layer takes one or the other."""

    items: Ints
    """[n, 4]: sequence, first row of the tile (query of the sequence * group_size + head of the group), number of rows,
    0. Rows that are split come first."""
    num_split: int
    """Items of rows that are split."""
    split_items: Ints
    """[s, 4], pass after pass: as `items`, and in the last word the split in units of its own length, with log2 of that
    from bit 24 on."""
    merges: Ints
    """[T, 4] by row of the step, [0, 4] where none is split: row (-1: not split), first partial, partials, split of the
    first partial."""
    passes: tuple[PrefillPass, ...]
    num_partials: int
    """Of a pass, at most."""

    @property
    def walks(self) -> int:
        """Thread blocks of each KV head in a layer that splits."""
        return len(self.items) - self.num_split + len(self.split_items)

    def partial_bytes(self, num_heads: int, head_size: int) -> int:
        """Bytes of all partial results of one layer, each written once and read once."""
        return int(self.merges[:, 2].clip(0).sum()) * partial_bytes(num_heads, head_size)


def prefill_work(
    query_start: Ints,
    context_lens: Ints,
    sequences: Ints,
    *,
    group_size: int,
    tile: KernelTile,
    window: int = 0,
    pass_partials: int = 1 << 30,
    rule: SplitRule = SPLIT_RULE,
) -> PrefillWork:
    """Items of the rows of `sequences`, indices in order. Items that walk the most keys come first, so that thread
    blocks that start last are short.

    `window`: the widest of any layer; 0: none. `pass_partials`: partial results of a pass, at most, where one query has
    fewer.
    """
    if not len(sequences):
        return PrefillWork(NONE, 0, NONE, NONE, (), 0)
    counts = query_start[sequences + 1] - query_start[sequences]
    past = context_lens[sequences] - counts
    visible = int(context_lens[sequences].max())
    runs = _runs(past, counts, rule.classes(min(visible, window or visible)))
    whole = runs[:, 3] == 0
    short = _Tiles.of(runs[whole], np.zeros(len(runs), np.int32), past, group_size, tile, window)
    items = short.items(sequences)[short.heaviest_first(tile)]
    if whole.all():
        return PrefillWork(items, 0, NONE, NONE, (), 0)
    split = SplitRows.of(runs[~whole], past, window, pass_partials, max(tile.rows // group_size, 1))
    long = _Tiles.of(*split.runs(), past, group_size, tile, window)
    items = np.concatenate([long.items(sequences)[long.heaviest_first(tile)], items])
    split_items, of_pass = long.of_splits(sequences, tile)
    rows = query_start[sequences[split.place]] + split.query
    merges = np.full((int(query_start[-1]), 4), -1, np.int32)
    merges[rows] = np.stack([rows, split.first_partial, split.partials, split.first_split], axis=1)
    passes = []
    for number in range(split.num_passes):
        first_item, end_item = np.searchsorted(of_pass, [number, number + 1]).tolist()
        mine = rows[split.number_of_pass == number]
        first_row, last_row = int(mine[0]), int(mine[-1])
        passes.append(PrefillPass(first_item, end_item - first_item, first_row, last_row + 1 - first_row))
    return PrefillWork(items, len(long.place), split_items, merges, tuple(passes), split.num_partials)


@dataclass(frozen=True)
class _Tiles:
    """Tiles of rows, each of one sequence and one length of splits. [n] each."""

    place: Ints
    """Of the sequence, among those that were planned."""
    first: Ints
    rows: Ints
    log2: Ints
    """Of the length of splits; 0: whole."""
    number_of_pass: Ints
    oldest: Ints
    """First position that any row sees."""
    last: Ints
    """Last position that any row sees."""

    @classmethod
    def of(cls, runs: Ints, number_of_pass: Ints, past: Ints, group_size: int, tile: KernelTile, window: int) -> _Tiles:
        """`runs` [r, 4]: place, first query, end query, log2. `number_of_pass`: of each run."""
        begin, end = runs[:, 1] * group_size, runs[:, 2] * group_size
        run, number = repeated(-(-(end - begin) // tile.rows))
        first = begin[run] + number * tile.rows
        rows = np.minimum(tile.rows, end[run] - first)
        before = past[runs[run, 0]]
        oldest = oldest_visible(before + first // group_size, window)
        last = before + (first + rows - 1) // group_size
        return cls(runs[run, 0], first, rows, runs[run, 3], number_of_pass[run], oldest, last)

    def items(self, sequences: Ints) -> Ints:
        """[n, 4]: as `PrefillWork.items`, in the order of the tiles."""
        words = [sequences[self.place], self.first, self.rows, np.zeros_like(self.first)]
        return np.stack(words, axis=1).astype(np.int32)

    def heaviest_first(self, tile: KernelTile) -> Ints:
        """[n]: indices, those of tiles that walk the most keys first."""
        return np.argsort(self.oldest // tile.keys - self.last // tile.keys, kind="stable").astype(np.int32)

    def of_splits(self, sequences: Ints, tile: KernelTile) -> tuple[Ints, Ints]:
        """[s, 4]: as `PrefillWork.split_items`; and [s], the pass of each."""
        first_split = self.oldest >> self.log2
        of, number = repeated((self.last >> self.log2) - first_split + 1)
        split = first_split[of] + number
        begin = np.maximum(split << self.log2[of], self.oldest[of])
        last = np.minimum(((split + 1) << self.log2[of]) - 1, self.last[of])
        # Neighbours have the same split, whose keys the later ones find in the cache.
        order = np.lexsort((split, begin // tile.keys - last // tile.keys, self.number_of_pass[of]))
        items = self.items(sequences)[of]
        items[:, 3] = split | self.log2[of] << 24
        return items[order], self.number_of_pass[of[order]]


def _runs(past: Ints, counts: Ints, classes: list[tuple[int, int]]) -> Ints:
    """[r, 4]: place, first query, end query, log2 of splits: the queries of each sequence by class of `SplitRule`, in
    order."""
    if len(classes) == 1:
        rows = np.flatnonzero(counts).astype(np.int32)
        return np.stack([rows, np.zeros_like(rows), counts[rows], np.zeros_like(rows)], axis=1)
    # A query at position p sees p + 1 keys; one in front of every key, none.
    edges = [-(1 << 31), *(least - 1 for least, _ in classes[1:]), 1 << 31]
    found = []
    for (low, high), (_, log2) in zip(pairwise(edges), classes, strict=True):
        first, end = (np.clip(edge - past.astype(np.int64), 0, counts) for edge in (low, high))
        some = np.flatnonzero(end > first)
        found.append(np.stack([some, first[some], end[some], np.full_like(some, log2)], axis=1))
    runs = np.concatenate(found).astype(np.int32)
    return runs[np.lexsort((runs[:, 1], runs[:, 0]))]
