"""Work of the decode kernel: its items, the merges of their partial results, and the sizes of its thread blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagekv.kernels.variants import Variant

Ints = np.ndarray[Any, np.dtype[np.int32]]

SPLIT_TOKENS = 256
"""Keys of an item: a row's keys are cut at absolute multiples of this, so that the bits of its result depend on the row
alone and on no other row of the batch. Small enough that 64 rows of 1k tokens fill a GPU even with one KV head."""

MOST_FUSED_PARTIALS = 16
"""Rows of at most this many splits are merged by the decode kernel itself, which saves a launch; a row's last thread
block merges alone, which takes too long for more. The choice changes no bit."""

MAX_BLOCKS = 4096
"""Thread blocks of a launch, at most: some ten for each one that an H200 runs at a time. Beyond that a block takes
several items, so that the padding of a captured graph costs nothing."""

CHUNK_BYTES = 16
MIN_ROWS = 16
"""KernelTile.rows of any decode variant is at least this."""


@dataclass(frozen=True)
class KernelTile:
    """The share of a thread block at a time."""

    keys: int
    """Tiles of keys begin at multiples of this."""
    rows: int
    """Decode: most query heads of a thread block; several blocks share a KV head with more. Prefill: query rows; a row
    is one (query, query head) pair of a KV head's group."""
    threads: int
    shared_bytes: int
    """Dynamic shared memory of the thread block."""


def decode_tile(variant: Variant) -> KernelTile:
    """The tile of a variant's decode kernel, with the sizes of `src/decode.cuh` and the headers below it."""
    head_size, fp32 = variant.head_size, variant.dtype == "float32"
    row_bytes = head_size * variant.kv_element_bytes
    tokens = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    warps = 4 if fp32 else tokens // 16
    rows = 16 if fp32 else warps * 16 if head_size <= 128 else 32
    tile_bytes = 2 * tokens * padded_row(row_bytes)
    stages = min(65536 // (2 * tokens * row_bytes), 4)
    if fp32:
        behind_ring = rows * (head_size + tokens) * 4
    else:
        behind_ring = rows * padded_row(head_size * 2)
        if head_size <= 128 and behind_ring <= tile_bytes:
            behind_ring = 0  # queries are in the ring until they are in registers
    return KernelTile(tokens, rows, warps * 32, SPLIT_TOKENS * 4 + stages * tile_bytes + behind_ring)


def padded_row(row_bytes: int) -> int:
    """The bytes rounded up to an odd number of 16-byte chunks, so that rows begin in different banks."""
    return (row_bytes // CHUNK_BYTES | 1) * CHUNK_BYTES


def most_partials(context_len: int) -> int:
    """The most partial results of a row of at most this many keys."""
    splits = -(-context_len // SPLIT_TOKENS)
    return splits if splits > 1 else 0


def merge_counters(num_heads: int, num_kv_heads: int) -> int:
    """Counters of the decode kernel for one merge: one for each KV head and thread block that shares it."""
    return num_kv_heads * -(-num_heads // num_kv_heads // MIN_ROWS)


@dataclass(frozen=True)
class DecodeWork:
    """Items of a step's decode rows."""

    items: Ints
    """[n, 4]: row, sequence, split, merge (-1: the row has one split and its result goes straight out)."""
    merges: Ints
    """[m, 4]: row, first partial, number of partials, split of the first partial. A row's partials are neighbours."""
    num_partials: int
    most_partials: int
    """Of one row."""


def decode_work(*, rows: Ints, sequences: Ints, context_lens: Ints, window: int = 0) -> DecodeWork:
    """Items of the given decode rows (parallel arrays [R]), the longest first, so that thread blocks that start last
    are short.

    `window`: splits wholly before it are left out; 0: none. A row without keys still has an item, which writes zeros.
    """
    lens = np.asarray(context_lens, np.int32)
    oldest, first, splits = _splits(lens, window)
    end = lens // SPLIT_TOKENS
    merged = splits > 1
    partials = splits * merged
    merge = np.where(merged, np.cumsum(merged) - 1, -1)
    merges = _columns(rows, np.cumsum(partials) - partials, splits, first)[merged]

    # Whole splits come first; the others are at most two a row: cut short by the window, or by the row's end.
    begin = -(-oldest // SPLIT_TOKENS)
    count = np.maximum(end - begin, 0)
    whole = np.repeat(_columns(rows, sequences, begin - np.cumsum(count) + count, merge), count, axis=0)
    whole[:, 2] += np.arange(len(whole), dtype=np.int32)
    by_window = oldest % SPLIT_TOKENS > 0
    by_end = ((lens % SPLIT_TOKENS > 0) | (lens == 0)) & ~(by_window & (end == first))
    owner = np.concatenate([np.flatnonzero(by_window), np.flatnonzero(by_end)])
    split = np.concatenate([first[by_window], end[by_end]])
    keys = np.minimum((split + 1) * SPLIT_TOKENS, lens[owner]) - np.maximum(split * SPLIT_TOKENS, oldest[owner])
    order = np.argsort(-keys, kind="stable")
    short = _columns(rows[owner], sequences[owner], split, merge[owner])[order]
    return DecodeWork(np.concatenate([whole, short]), merges, int(partials.sum()), int(partials.max(initial=0)))


def num_decode_items(context_lens: Ints, window: int = 0) -> int:
    """The number of items that `decode_work` makes of rows with these many keys."""
    return int(_splits(np.asarray(context_lens, np.int32), window)[2].sum())


def _splits(lens: Ints, window: int) -> tuple[Ints, Ints, Ints]:
    """By row: its oldest visible key, its first split, and the number of its splits."""
    oldest = np.maximum(lens - window, 0) if window else np.zeros_like(lens)
    first = oldest // SPLIT_TOKENS
    return oldest, first, np.maximum(-(-lens // SPLIT_TOKENS) - first, 1)


def _columns(*columns: Ints) -> Ints:
    """The columns as one array [n, len(columns)]."""
    array = np.empty((len(columns[0]), len(columns)), np.int32)
    for index, column in enumerate(columns):
        array[:, index] = column
    return array
