"""Work of the decode kernel: its items, the merges of their partial results, and the sizes of its thread blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pagekv.kernels.shared_splits import SharedSplits, shared_splits
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import Variant

LEAST_SPLIT = 256
"""Keys of an item of a short row. Small enough that 64 rows of 1k tokens fill a GPU even with one KV head."""

LONGER_SPLITS_BEYOND = (4096, 16384, 65536)
"""Beyond each of these numbers of visible keys, a row's splits are twice as long. So partial results stay few in
comparison with keys, and a thread block's beginning and end stay short in comparison with its work. Splits begin at
absolute multiples of their length, which follows from the row's own context, so the bits of a row's result do not
depend on the other rows of the batch."""

MOST_FUSED_PARTIALS = 16
"""Rows of at most this many splits are merged by the decode kernel itself, which saves a launch. The thread block that
finishes a row's last split merges the row alone, which would take too long for more splits. The choice changes no
bit."""

MOST_MEMBERS = 64
"""Rows of a batch in a wide thread block, at most."""

CHUNK_BYTES = 16
MIN_ROWS = 16
"""KernelTile.rows of any decode variant is at least this."""


@dataclass(frozen=True)
class KernelTile:
    """The sizes of a thread block and of the tile that it works on at a time."""

    keys: int
    """Tiles of keys begin at multiples of this."""
    rows: int
    """Most query rows of a thread block; a row is one (query, query head) pair of a KV head's group."""
    threads: int
    shared_bytes: int
    """Dynamic shared memory of the thread block."""


def decode_tile(variant: Variant, *, wide: bool = False) -> KernelTile:
    """The tile of a variant's decode kernel, or of the `wide` one, with the sizes of `src/decode.cuh` and the headers
    below it."""
    head_size, fp32 = variant.head_size, variant.dtype == "float32"
    row_bytes = head_size * variant.kv_element_bytes
    tokens = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    row_tiles = (4 if head_size <= 128 else 2) if wide and not fp32 else 1
    warps = 4 if fp32 else tokens // 16 * row_tiles
    rows = 16 * row_tiles
    tile_bytes = 2 * tokens * padded_row(row_bytes)
    ring_space = 65536 if wide or row_bytes > 128 else 49152 if head_size <= 64 else 40960
    stages = min(ring_space // (2 * tokens * row_bytes), 4)
    if fp32:
        behind_ring = rows * (head_size + tokens) * 4
    else:
        fp8 = variant.kv_element_bytes == 1
        behind_ring = rows * ((head_size * 2 // 32 | 1) * 32 if fp8 else padded_row(head_size * 2))
    # Block ids of two segments, records of two items, the launch, then flags and members of both items.
    before_ring = 2 * LEAST_SPLIT * 4 + 2 * 32 + 32 + (MOST_MEMBERS * (4 + 2 * 16) if wide else 16)
    return KernelTile(tokens, rows, warps * 32, before_ring + stages * tile_bytes + behind_ring)


def most_members(variant: Variant, group: int) -> int:
    """Rows whose `group` query heads a wide thread block has room for."""
    return decode_tile(variant, wide=True).rows // group


def every_item_is_wide(variant: Variant, group: int) -> bool:
    """Whether a group has more query heads than a thread block of `pagekv_decode` has rows, so that
    `pagekv_decode_wide` takes all items."""
    return group > decode_tile(variant).rows and variant.dtype != "float32"


def padded_row(row_bytes: int) -> int:
    """The bytes rounded up to an odd number of 16-byte chunks, so that rows begin in different banks."""
    return (row_bytes // CHUNK_BYTES | 1) * CHUNK_BYTES


def most_partials(context_len: int, window: int = 0) -> int:
    """The most partial results of a row in a context of up to `context_len` keys; 0 if it has one split. `window`: how
    many keys the row sees; 0: all."""
    visible = min(context_len, window or context_len)
    bounds = (*(bound for bound in LONGER_SPLITS_BEYOND if bound < visible), visible)
    splits = max(-(-bound // (LEAST_SPLIT << longer)) for longer, bound in enumerate(bounds))
    splits += visible < context_len  # a window may begin and end within a split
    return splits if splits > 1 else 0


def splits_longer(visible: Ints) -> Ints:
    """How often the splits of rows with so many visible keys are doubled: they have LEAST_SPLIT << this keys."""
    return np.searchsorted(LONGER_SPLITS_BEYOND, visible).astype(np.int32)


def merge_counters(num_heads: int, num_kv_heads: int) -> int:
    """Counters of the decode kernel for one merge: one for each KV head and thread block that shares it."""
    return num_kv_heads * -(-num_heads // num_kv_heads // MIN_ROWS)


@dataclass(frozen=True)
class DecodeWork:
    """Items of a step's decode rows. Every split of every row is in one item, either of one row or a wide one."""

    items: Ints
    """[n, 4]: row, sequence, split, merge (-1: the row has one split, and its result goes straight out). The word of
    the split counts in units of its own length, and has `splits_longer` in its bits from 24 on."""
    item_contexts: Ints
    """[n]: visible keys of each item's row."""
    wide_items: Ints
    """[w, 4]: first member, sequence whose table names the blocks, split (as in `items`), number of members."""
    members: Ints
    """[R, 4] if there may be wide items, else [0, 4]: row, sequence, merge, visible keys."""
    merges: Ints
    """[m, 4]: row, first partial, number of partials, split of the first partial. A row's partials are neighbours."""
    num_splits: int
    """Splits of all rows: the number of items if each had one row."""
    num_partials: int
    most_partials: int
    """The most partial results of one row."""
    keys_read: int
    """Keys that all items read for each KV head; a wide item reads its keys once for all members."""
    all_wide: bool
    """Whether every item is a wide one, as `every_item_is_wide` says."""

    def with_empty_rows(self, rows: Ints, sequence: int) -> DecodeWork:
        """The same work and an item for each of `rows`, whose `sequence` has no keys: it writes zeros."""
        zeros, none = np.zeros_like(rows), np.full_like(rows, -1)
        items, contexts, wide_items, members = self.items, self.item_contexts, self.wide_items, self.members
        if self.all_wide:
            at = len(members) + np.arange(len(rows), dtype=np.int32)
            wide_items = np.concatenate([wide_items, _columns(at, zeros + sequence, zeros, zeros + 1)])
            members = np.concatenate([members, _columns(rows, zeros + sequence, none, zeros)])
        else:
            items = np.concatenate([items, _columns(rows, zeros + sequence, zeros, none)])
            contexts = np.concatenate([contexts, zeros])
        return replace(
            self,
            items=items,
            item_contexts=contexts,
            wide_items=wide_items,
            members=members,
            num_splits=self.num_splits + len(rows),
        )


def decode_work(
    *,
    rows: Ints,
    sequences: Ints,
    context_lens: Ints,
    window: int = 0,
    tables: Ints | None = None,
    block_size: int = 1,
    most_members: int = 1,
    all_wide: bool = False,
) -> DecodeWork:
    """Items of the given decode rows (parallel arrays [R]), the longest first, so that thread blocks that start last
    are short.

    `window`: splits wholly before it are left out; 0: none. A row without keys still has an item, which writes zeros.
    `tables` [R, W]: block ids of each row's sequence; up to `most_members` rows share a split of the same blocks.
    `all_wide`: every item is a wide one, as `every_item_is_wide` says.
    """
    lens = np.asarray(context_lens, np.int32)
    longer = splits_longer(np.minimum(lens, window) if window else lens)
    length = LEAST_SPLIT << longer
    # For each row: its oldest visible key, its first split, the split after its last whole one, its number of splits.
    oldest = np.maximum(lens - window, 0) if window else np.zeros_like(lens)
    first, end = oldest // length, lens // length
    splits = np.maximum(-(-lens // length) - first, 1)
    merged = splits > 1
    partials = splits * merged
    merge = np.where(merged, np.cumsum(merged) - 1, -1).astype(np.int32)
    merges = _columns(rows, np.cumsum(partials) - partials, splits, first)[merged]

    # Whole splits. A row has at most two others: one that the window cuts short, and one that the row's end cuts short.
    begin = -(-oldest // length)
    shared = SharedSplits.none(len(lens))
    if tables is not None and most_members > 1:
        shared = shared_splits(tables, begin, end, blocks_per_split=length // block_size, most=most_members)
    count = np.maximum(end - begin, 0)
    whole_of = np.repeat(np.arange(len(lens)), count)
    whole_split = np.arange(len(whole_of)) - np.repeat(np.cumsum(count) - count, count) + begin[whole_of]
    if len(shared.runs):
        depth = shared.covered.shape[1]
        alone = ~((whole_split < depth) & shared.covered[whole_of, np.minimum(whole_split, depth - 1)])
        whole_of, whole_split = whole_of[alone], whole_split[alone]
    by_window = oldest % length > 0
    by_end = ((lens % length > 0) | (lens == 0)) & ~(by_window & (end == first))
    owner = np.concatenate([whole_of, np.flatnonzero(by_window), np.flatnonzero(by_end)])
    split = np.concatenate([whole_split, first[by_window], end[by_end]])
    at = split * length[owner]
    keys = np.minimum(at + length[owner], lens[owner]) - np.maximum(at, oldest[owner])
    longest = np.argsort(-keys, kind="stable")
    owner, split = owner[longest], split[longest]

    order, runs = shared.order, shared.runs
    leader = order[runs[:, 0]]
    wide_items = _columns(runs[:, 0], sequences[leader], runs[:, 2] | longer[leader] << 24, runs[:, 1])
    split_of_item = split | longer[owner] << 24
    items = _columns(rows[owner], sequences[owner], split_of_item, merge[owner])
    keys_read = int(keys.sum()) + int(length[leader].sum())
    if all_wide:
        place = np.empty_like(order)
        place[order] = np.arange(len(order), dtype=np.int32)
        one = np.ones_like(owner)
        wide_items = np.concatenate([wide_items, _columns(place[owner], sequences[owner], split_of_item, one)])
        items, owner = items[:0], owner[:0]
    members = _columns(rows[order], sequences[order], merge[order], lens[order])
    return DecodeWork(
        items=items,
        item_contexts=lens[owner],
        wide_items=wide_items,
        members=members if all_wide or len(wide_items) else members[:0],
        merges=merges,
        num_splits=int(splits.sum()),
        num_partials=int(partials.sum()),
        most_partials=int(partials.max(initial=0)),
        keys_read=keys_read,
        all_wide=all_wide,
    )


def _columns(*columns: Ints) -> Ints:
    array = np.empty((len(columns[0]), len(columns)), np.int32)
    for index, column in enumerate(columns):
        array[:, index] = column
    return array
