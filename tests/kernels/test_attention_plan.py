"""A step's plan: refused batches, the one upload, and fixed places for a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.kernels.small_step import BATCH, NUM_BLOCKS, plan

from pagekv.kernels.attention_plan import ALIGN, GraphKey, HostPlan, StepBatch


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
    assert set(host.offsets) == {*plan().offsets, "input_ids", "last_rows"}
    assert all(start % ALIGN == 0 for start in starts)
    assert section(host, "input_ids", 5) == [0, 1, 2, 3, 4]
    bound = host.bind(4096, 16)
    assert bound.at == {name: 4096 + 4 * offset for name, offset in host.offsets.items()}


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


GRAPH = GraphKey(batch=6, table_width=5, items=8)
DECODES = changed(
    query_start=[0, 1, 2, 2], context_lens=[9, 1, 0], block_tables=BATCH.block_tables[:3], decodes=[True, True, False]
)


def test_sections_of_a_graph_stay_where_they_are() -> None:
    small = changed(query_start=[0, 1], context_lens=[1], block_tables=[[1]], decodes=[True])
    one, other = plan(DECODES, graph=GRAPH), plan(small, graph=GRAPH)
    assert one.offsets == other.offsets
    assert one.counts == other.counts
    assert one.words.shape == other.words.shape


def test_padding_does_nothing() -> None:
    """But that rows beyond the step's, which belong to a sequence without keys, are decoded: to zeros."""
    host = plan(DECODES, graph=GRAPH)
    assert section(host, "query_start", 7) == [0, 1, 2, 2, 2, 2, 2]
    assert section(host, "context_lens", 6) == [9, 1, 0, 0, 0, 0]
    assert section(host, "slots", 6)[2:] == [-1, -1, -1, -1]
    assert section(host, "decode_items", 8, 4)[2:6] == [[row, 3, 0, -1] for row in (2, 3, 4, 5)]
    assert section(host, "item_contexts", 6) == [9, 1, 0, 0, 0, 0]
    assert section(host, "dealt", 2, 2) == [[0, 6], [0, 0]], "what is behind six items is no work"
    assert {row[0] for row in section(host, "merge_items", 6, 4)} == {-1}


@pytest.mark.parametrize(
    ("batch", "graph", "message"),
    [
        (DECODES, GraphKey(2, 5, 8), r"query_start: \(4,\) does not fit the graph's \(3,\)"),
        (DECODES, GraphKey(6, 2, 8), r"block_tables: \(3, 3\) does not fit"),
        (DECODES, GraphKey(6, 5, 4), r"decode_items: \(6, 4\) does not fit the graph's \(4, 4\)"),
        (DECODES, GraphKey(3, 5, 8), "batch: 1 padded rows need one more than the 3 sequences"),
        (BATCH, GRAPH, r"prefill_items: \(1, 4\) does not fit the graph's \(0, 4\)"),
    ],
)
def test_a_step_beyond_the_graph_is_refused(batch: StepBatch, graph: GraphKey, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(batch, graph=graph)
