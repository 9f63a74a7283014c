"""A step's plan: refused batches, the one upload, and fixed places for a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.kernels.small_step import BATCH, NUM_BLOCKS, plan

from pagekv.kernels.attention_plan import ALIGN, SECTIONS, GraphCapacity, HostPlan, StepBatch


def section(host: HostPlan, name: str, *shape: int) -> list[Any]:
    start = host.offsets[name]
    found: list[Any] = host.words[start : start + int(np.prod(shape))].reshape(shape).tolist()
    return found


def changed(**fields: Any) -> StepBatch:
    return replace(BATCH, **{name: np.array(value) for name, value in fields.items()})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed(query_start=[0, 1, 2, 5]), "query_start: must have 5 entries"),
        (changed(query_start=[1, 2, 3, 3, 6]), "query_start: must start at 0, got 1"),
        (changed(query_start=[0, 2, 1, 1, 4]), "query_start: falls at sequence 1"),
        (changed(context_lens=[9, 1, 0, 2]), r"context_lens: is below the number of rows of sequence 3 \(2\)"),
        (changed(context_lens=[13, 1, 0, 5]), r"context_lens: is above the 12 slots of the block table of sequence 0"),
        (changed(block_tables=[[7, 2, 5]]), r"block_tables: must have 4 rows, got shape \(1, 3\)"),
        (changed(decodes=[True, True, False, True]), "decodes: a decode has exactly one row, unlike sequence 3"),
        (changed(decodes=[True]), "decodes: must have 4 entries"),
    ],
)
def test_a_bad_batch_is_refused_by_name(batch: StepBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(batch)


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_a_block_outside_of_the_pool_is_refused_where_it_is_used(block: int) -> None:
    tables = BATCH.block_tables.copy()
    tables[0, 2] = block
    message = rf"block {block} of sequence 0 \(entry 2\) must be in \[0, {NUM_BLOCKS}\)"
    with pytest.raises(ValueError, match=message):
        plan(replace(BATCH, block_tables=tables))
    # Two blocks hold 8 tokens: with those, the third entry is not looked at.
    plan(replace(BATCH, block_tables=tables, context_lens=np.array([8, 1, 0, 5], np.int32)))


def test_slots_that_do_not_fit_are_refused() -> None:
    tables = np.full((4, 3), (1 << 31) // 256, np.int32)
    with pytest.raises(ValueError, match="slots: 2147483650 does not fit 32 bits"):
        plan(changed(block_tables=tables, context_lens=[1, 1, 0, 3]), num_blocks=1 << 24, block_size=256)


def test_rows_know_their_positions_and_slots() -> None:
    host = plan()
    assert section(host, "positions", 5) == [8, 0, 2, 3, 4]
    # Block 5 holds positions 8 to 11 of the first sequence; the chunk goes on in block 0 and ends in block 6.
    assert section(host, "slots", 5) == [5 * 4, 1 * 4, 0 * 4 + 2, 0 * 4 + 3, 6 * 4]


def test_every_section_starts_at_16_bytes_and_none_overlap() -> None:
    host = plan(extra={"input_ids": np.arange(5), "last_rows": np.arange(4)})
    starts = sorted(host.offsets.values())
    assert set(host.offsets) == {*SECTIONS, "input_ids", "last_rows"}
    assert all(start % ALIGN == 0 for start in starts)
    assert section(host, "input_ids", 5) == [0, 1, 2, 3, 4]
    bound = host.bind(4096, 16)
    assert bound.extra == {name: 4096 + 4 * host.offsets[name] for name in ("input_ids", "last_rows")}
    assert bound.slots == 4096 + 4 * host.offsets["slots"]


def test_a_plan_is_bound_to_aligned_memory_only() -> None:
    with pytest.raises(ValueError, match="address: must be a multiple of 16"):
        plan().bind(4100, 0)


def test_partial_results_need_scratch() -> None:
    tables = np.arange(1024, dtype=np.int32)[None]
    long = StepBatch(np.array([0, 1], np.int32), np.array([4096], np.int32), tables, np.array([True]))
    host = plan(long, num_blocks=1024)
    assert host.counts["num_partials"] > 1
    with pytest.raises(ValueError, match="scratch: this step has partial results"):
        host.bind(4096)


CAPACITY = GraphCapacity(sequences=6, rows=8, table_width=5, decode_items=8, merge_items=2, prefill_items=3, partials=4)


def test_sections_of_a_capacity_stay_where_they_are() -> None:
    small = changed(query_start=[0, 1], context_lens=[1], block_tables=[[1]], decodes=[True])
    one, other = plan(capacity=CAPACITY), plan(small, capacity=CAPACITY)
    assert one.offsets == other.offsets
    assert one.counts == other.counts
    assert one.words.shape == other.words.shape


def test_padding_does_nothing() -> None:
    """But that rows beyond the step's, which belong to a sequence without keys, are decoded: to zeros."""
    host = plan(capacity=CAPACITY)
    assert section(host, "query_start", 7) == [0, 1, 2, 2, 5, 5, 5]
    assert section(host, "context_lens", 6) == [9, 1, 0, 5, 0, 0]
    assert section(host, "slots", 8)[5:] == [-1, -1, -1]
    assert section(host, "decode_items", 8, 4)[2:5] == [[5, 4, 0, -1], [6, 4, 0, -1], [7, 4, 0, -1]]
    assert {row[0] for row in section(host, "decode_items", 8, 4)[5:]} == {-1}
    assert {row[0] for row in section(host, "merge_items", 2, 4)} == {-1}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sequences", 3, r"query_start: \(5,\) does not fit the capacity of \(4,\)"),
        ("rows", 4, r"slots: \(5,\) does not fit"),
        ("table_width", 2, r"block_tables: \(4, 3\) does not fit"),
        ("decode_items", 4, r"decode_items: \(5, 4\) does not fit the capacity of \(4, 4\)"),
        ("sequences", 4, "sequences: 3 padded rows need one more than the 4 there are"),
    ],
)
def test_a_step_beyond_the_capacity_is_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(capacity=replace(CAPACITY, **{field: value}))
