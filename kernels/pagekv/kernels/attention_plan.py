"""One step's attention work: validated on the host, laid out in NumPy arrays, packed into one upload, bound to
addresses.

    batch = StepBatch(query_start, context_lens, block_tables, decodes)
    host = StepPlanner(num_blocks, block_size, num_heads, num_kv_heads, variant).step(batch)
    buffer[: host.words.size].copy_(pinned)        # the step's only upload; the caller owns both buffers
    plan = host.bind(buffer.data_ptr(), scratch.data_ptr())

Every section of the upload starts at a multiple of 16 bytes. With a `GraphKey`, sections have a fixed size and place,
so that a captured CUDA graph may read them again and again. Sections are padded with work that does nothing. Rows are
padded with decodes that see no keys, whose result is zeros, so later operators never compute on memory that was not
written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagekv.kernels.decode_plan import (
    MOST_FUSED_PARTIALS,
    DecodeWork,
    decode_work,
    every_item_is_wide,
    merge_counters,
    most_members,
    most_partials,
)
from pagekv.kernels.prefill_plan import PrefillWork, prefill_tile, prefill_work
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import Variant

ALIGN = 4
"""In int32 words: sections start at multiples of 16 bytes."""
PADDING = -1
"""First word of a padded slot, merge or prefill item: kernels skip it."""
SKIPPED_BELOW_ZERO = ("slots", "merge_items", "prefill_items")
"""Sections that are padded with PADDING."""


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step. S: sequences, T: rows, W: width of the block tables. Integer arrays of any width."""

    query_start: Ints
    """[S + 1]: first row of each sequence among the step's packed rows; starts at 0, ends at T, never falls."""
    context_lens: Ints
    """[S]: visible keys of each sequence's last row, those of this step included."""
    block_tables: Ints
    """[S, W]: block ids; entries past a sequence's last block are ignored."""
    decodes: np.ndarray[Any, np.dtype[np.bool_]]
    """[S]: True for a sequence whose single row is a generated token (the decode kernel), False for any other rows (the
    prefill kernel). The two kernels may differ in the last bits, so all rows of a prompt should take the prefill
    kernel."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The sizes of the sections that a captured CUDA graph reads; it replays steps of decodes. A step with fewer rows
    is padded with a decode item for each missing row; then the graph must have room for one sequence more than the
    step.
    """

    batch: int
    """Sequences, and rows."""
    table_width: int
    items: int
    """Splits of all rows: `batch` if no sequence has more than one."""
    wide_items: int = 0
    """Decode items of several rows, for sequences that share blocks; 0: none."""

    @property
    def partials(self) -> int:
        return self.items if self.items > self.batch else 0

    def shapes(self, *, all_wide: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the sections whose sizes the step decides if there is no graph. `all_wide`: as in `DecodeWork`."""
        alone, wide = (0, self.items) if all_wide else (self.items, self.wide_items)
        return {
            "query_start": (self.batch + 1,),
            "context_lens": (self.batch,),
            "block_tables": (self.batch, self.table_width),
            "slots": (self.batch,),
            "positions": (self.batch,),
            "decode_items": (alone, 4),
            "item_contexts": (alone,),
            "wide_items": (wide, 4),
            "members": (self.batch if wide else 0, 4),
            "merge_items": (self.batch if self.partials else 0, 4),
            "prefill_items": (0, 4),
            "split_items": (0, 4),
            "row_merges": (0, 4),
        }


@dataclass(frozen=True)
class AttentionPlan:
    """A step's work on the device: the addresses and counts that the kernels take."""

    num_rows: int
    table_stride: int
    num_decode_items: int
    num_wide_items: int
    num_merge_items: int
    num_prefill_items: int
    num_split_items: int
    """Prefill items of layers that split rows, instead of `num_prefill_items`; 0 if no row is split."""
    num_partials: int
    fused_merges: bool
    """Whether the decode kernels merge the partial results of decodes themselves."""
    at: Mapping[str, int]
    """Section -> its address."""
    scratch: int
    """Address of float32 [num_partials, num_heads, head_size + 2] words: see `PagedAttention.scratch_bytes`."""

    def partials(self, num_heads: int, head_size: int) -> tuple[int, int]:
        """Addresses of the partial results' outputs and of their (maximum, sum) pairs."""
        return self.scratch, self.scratch + self.num_partials * num_heads * head_size * 4


@dataclass(frozen=True)
class HostPlan:
    """A step's work before its upload."""

    words: Ints
    """[n]: all sections, in one array."""
    offsets: Mapping[str, int]
    """Section -> its first word."""
    counts: Mapping[str, int]
    fused_merges: bool

    def bind(self, address: int, scratch: int = 0) -> AttentionPlan:
        """The plan for a copy of `words` at a device address that is a multiple of 16.

        `scratch`: device address of `PagedAttention.scratch_bytes(counts["num_partials"])` bytes.
        """
        if address % (4 * ALIGN) or scratch % (4 * ALIGN):
            raise ValueError(f"address: must be a multiple of {4 * ALIGN}, got {address:#x} and scratch {scratch:#x}")
        if self.counts["num_partials"] and not scratch:
            raise ValueError("scratch: this step has partial results and needs memory for them")
        at = {name: address + 4 * offset for name, offset in self.offsets.items()}
        return AttentionPlan(**self.counts, fused_merges=self.fused_merges, at=at, scratch=scratch)


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans the steps of a model over a pool."""

    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    variant: Variant
    """The variant of the kernels, which decides the sizes of their tiles."""
    window: int = 0
    """The widest window of any layer; 0 if any layer sees everything."""

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def most_members(self) -> int:
        """The most rows that may share the read of a split; 1 if every item is a wide one, shared or not."""
        wide = every_item_is_wide(self.variant, self._group)
        return 1 if wide else most_members(self.variant, self._group)

    def decodes(self, batch: StepBatch, *, share: bool = True) -> DecodeWork:
        """The work of a batch's decodes; does not check the batch. `share`: whether rows may share the reads of equal
        blocks."""
        sequences = np.flatnonzero(np.asarray(batch.decodes, bool)).astype(np.int32)
        return decode_work(
            rows=np.asarray(batch.query_start, np.int32)[sequences],
            sequences=sequences,
            context_lens=np.asarray(batch.context_lens, np.int32)[sequences],
            window=self.window,
            tables=np.asarray(batch.block_tables, np.int32)[sequences],
            block_size=self.block_size,
            most_members=most_members(self.variant, self._group) if share else 1,
            all_wide=every_item_is_wide(self.variant, self._group),
        )

    def prefills(self, batch: StepBatch) -> PrefillWork:
        """The work of a batch's prompts; does not check the batch."""
        return prefill_work(
            np.asarray(batch.query_start, np.int32),
            np.asarray(batch.context_lens, np.int32),
            np.flatnonzero(~np.asarray(batch.decodes, bool)).astype(np.int32),
            group_size=self._group,
            tile=prefill_tile(self.variant),
            window=self.window,
        )

    def step(
        self,
        batch: StepBatch,
        *,
        graph: GraphKey | None = None,
        work: DecodeWork | None = None,
        extra: Mapping[str, Ints] | None = None,
    ) -> HostPlan:
        """Validates a batch and lays out its work.

        `graph`: sizes of the sections. `work`: the result of `decodes` for this batch, if it is known. `extra`: more
        int32 arrays for the same upload. Raises ValueError naming the field and the first offending entry.
        """
        query_start, context_lens, tables = (
            np.ascontiguousarray(array, np.int32)
            for array in (batch.query_start, batch.context_lens, batch.block_tables)
        )
        counts = validate(batch, self.num_blocks, self.block_size)
        positions = row_positions(query_start, context_lens, counts)
        slots = row_slots(tables, positions, counts, self.block_size)
        work = self.decodes(batch) if work is None else work
        # Padded rows belong to the sequence behind the step's last one, which has no keys.
        padding = np.arange(len(slots), max(graph.batch if graph else 0, len(slots)), dtype=np.int32)
        work = work.with_empty_rows(padding, len(context_lens))
        prefills = self.prefills(batch)
        # Steps that replay a graph may have as many partial results a row as the width of its block tables allows.
        longest = most_partials(graph.table_width * self.block_size, self.window) if graph else work.most_partials
        fused_merges = longest <= MOST_FUSED_PARTIALS
        arrays = {
            "query_start": query_start,
            "context_lens": context_lens,
            "block_tables": tables,
            "slots": slots,
            "positions": positions,
            "decode_items": work.items,
            "item_contexts": work.item_contexts,
            "wide_items": work.wide_items,
            "members": work.members,
            # For each decode kernel: the number of items dealt so far, and of items before the section's padding.
            "dealt": np.array([[0, len(work.items)], [0, len(work.wide_items)]], np.int32),
            "merge_items": work.merges,
            "merge_counters": np.zeros((len(work.merges), merge_counters(self.num_heads, self.num_kv_heads)), np.int32),
            "prefill_items": prefills.items,
            "split_items": prefills.split_items,
            "row_merges": _row_merges(work, prefills, fused_merges),
            **{name: np.ascontiguousarray(array, np.int32) for name, array in (extra or {}).items()},
        }
        num_partials = work.num_partials + prefills.num_partials
        shapes = {name: array.shape for name, array in arrays.items()}
        if graph:
            if num_partials > graph.partials:
                raise ValueError(f"partials: {num_partials} do not fit the {graph.partials} of the graph")
            if len(padding) and graph.batch == len(context_lens):
                raise ValueError(f"batch: {len(padding)} padded rows need one more than the {graph.batch} sequences")
            num_partials = graph.partials
            shapes |= graph.shapes(all_wide=work.all_wide)
            shapes["merge_counters"] = (shapes["merge_items"][0], *shapes["merge_counters"][1:])
        words, offsets = pack(arrays, shapes)
        return HostPlan(
            words,
            offsets,
            {
                "num_rows": shapes["slots"][0],
                "table_stride": shapes["block_tables"][1],
                "num_decode_items": shapes["decode_items"][0],
                "num_wide_items": shapes["wide_items"][0],
                "num_merge_items": shapes["merge_items"][0],
                "num_prefill_items": shapes["prefill_items"][0],
                "num_split_items": shapes["split_items"][0],
                "num_partials": num_partials,
            },
            fused_merges,
        )


def _row_merges(decodes: DecodeWork, prefills: PrefillWork, fused_merges: bool) -> Ints:
    """[T, 4], or [0, 4] if no prompt row is split: for each row, its merge in the launch that merges all rows. The
    partial results of prompts follow those of decodes. `fused_merges`: the decode kernels merge those of decodes."""
    merges = prefills.merges.copy()
    if len(merges):
        merges[merges[:, 0] >= 0, 1] += decodes.num_partials
        if not fused_merges:
            merges[decodes.merges[:, 0]] = decodes.merges
    return merges


def validate(batch: StepBatch, num_blocks: int, block_size: int) -> Ints:
    """Checks every id and length of a batch. Returns [S]: the number of rows of each sequence. Raises ValueError."""
    query_start, context_lens, tables = (
        np.asarray(a) for a in (batch.query_start, batch.context_lens, batch.block_tables)
    )
    sequences = len(context_lens)
    if query_start.shape != (sequences + 1,):
        raise ValueError(f"query_start: must have {sequences + 1} entries, got shape {query_start.shape}")
    if tables.ndim != 2 or len(tables) != sequences:
        raise ValueError(f"block_tables: must have {sequences} rows, got shape {tables.shape}")
    if np.shape(batch.decodes) != (sequences,):
        raise ValueError(f"decodes: must have {sequences} entries, got shape {np.shape(batch.decodes)}")
    if query_start[0] != 0:
        raise ValueError(f"query_start: must start at 0, got {query_start[0]}")
    counts = np.diff(query_start).astype(np.int32)
    _refuse("query_start", counts < 0, "falls at sequence {}", counts)
    _refuse("context_lens", context_lens < counts, "is below the number of rows of sequence {}", context_lens)
    limit = tables.shape[1] * block_size
    _refuse(
        "context_lens",
        context_lens > limit,
        f"is above the {limit} slots of the block table of sequence {{}}",
        context_lens,
    )
    _refuse("decodes", batch.decodes & (counts != 1), "a decode has exactly one row, unlike sequence {}", counts)
    used = np.arange(tables.shape[1]) * block_size < context_lens[:, None]
    bad = used & ((tables < 0) | (tables >= num_blocks))
    if bad.any():
        sequence, column = np.argwhere(bad)[0]
        raise ValueError(
            f"block_tables: block {tables[sequence, column]} of sequence {sequence} (entry {column}) "
            f"must be in [0, {num_blocks})"
        )
    return counts


def _refuse(name: str, bad: np.ndarray[Any, np.dtype[np.bool_]], what: str, values: np.ndarray[Any, Any]) -> None:
    if bad.any():
        sequence = int(np.argmax(bad))
        raise ValueError(f"{name}: {what.format(sequence)} ({values[sequence]})")


def row_positions(query_start: Ints, context_lens: Ints, counts: Ints) -> Ints:
    """[T]: position of every row in its sequence."""
    first = context_lens - counts
    return (np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], counts)).astype(np.int32)


def row_slots(tables: Ints, positions: Ints, counts: Ints, block_size: int) -> Ints:
    """[T]: slot (block * block_size + offset) of every row."""
    sequence = np.repeat(np.arange(len(counts)), counts)
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    if len(slots) and slots.max() > np.iinfo(np.int32).max:
        raise ValueError(f"slots: {slots.max()} does not fit 32 bits; the pool has too many blocks")
    return slots.astype(np.int32)


def pack(arrays: Mapping[str, Ints], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Ints, dict[str, int]]:
    """All arrays in one, and the first word of each. Every array begins at a multiple of 16 bytes and is padded to its
    shape in `shapes`; `query_start` is padded with its last entry."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        if any(have > room for have, room in zip(array.shape, shapes[name], strict=True)):
            raise ValueError(f"{name}: {array.shape} does not fit the graph's {shapes[name]}")
        offsets[name] = end
        end += -(-math.prod(shapes[name]) // ALIGN) * ALIGN
    words = np.zeros(max(end, ALIGN), np.int32)
    for name, array in arrays.items():
        target = words[offsets[name] :][: math.prod(shapes[name])].reshape(shapes[name])
        if name == "query_start":
            target[...] = array[-1]
        elif name in SKIPPED_BELOW_ZERO:
            target[...] = PADDING
        target[tuple(slice(size) for size in array.shape)] = array
    return words, offsets
