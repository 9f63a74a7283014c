"""The plan of a step: rows, slots, groups; what it costs is bounded."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu import attention_plan as plan_module
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan, DecodeGroup, PromptChunk, SharedPrefix, shared_prefixes

BLOCK_SIZE = 4
NULL = 10**6


def scheduled(seq_id: int, table: list[int], start: int, count: int, known: int | None = None) -> Scheduled:
    tokens = [100 * seq_id + position for position in range(start + count if known is None else known)]
    return Scheduled(SequenceState(seq_id, tokens, 1, table, start, Sampling()), start, count)


def build(items: list[Scheduled], block_bytes: int = 2**15) -> CpuAttentionPlan:
    return CpuAttentionPlan(items, BLOCK_SIZE, NULL, block_bytes, torch.float32)


def test_rows_slots_and_samples() -> None:
    """Chunks stand before decodes; a chunk that leaves known tokens over samples nothing."""
    step = build([scheduled(1, [7, 3], 5, 1), scheduled(2, [9, 8, 6], 2, 7, known=20), scheduled(3, [5], 0, 3)])
    assert step.input_ids.tolist() == [[*range(202, 209), 300, 301, 302, 105]]
    assert step.position_ids.tolist() == [[*range(2, 9), 0, 1, 2, 5]]
    blocks, offsets = step.slots
    assert blocks.tolist() == [9, 9, 8, 8, 8, 8, 6, 5, 5, 5, 3]
    assert offsets.tolist() == [2, 3, 0, 1, 2, 3, 0, 0, 1, 2, 1]
    assert [(row, state.seq_id) for row, state in step.sampling] == [(9, 3), (10, 1)]


def test_slots_follow_the_block_table() -> None:
    """With blocks of 4 and the table [19, 18, 5], position p is in table[p // 4] at offset p % 4."""
    blocks, offsets = build([scheduled(1, [19, 18, 5], 0, 11)]).slots
    slots = list(zip(blocks.tolist(), offsets.tolist(), strict=True))
    assert [slots[position] for position in (0, 3, 4, 8, 10)] == [(19, 0), (19, 3), (18, 0), (5, 0), (5, 2)]


def test_parts_cover_every_row_in_order() -> None:
    rng = random.Random(0)
    for _ in range(50):
        items = [
            scheduled(seq_id, list(range(20 * seq_id, 20 * seq_id + 20)), rng.randrange(40), rng.choice([1, 1, 5, 30]))
            for seq_id in range(rng.randint(1, 12))
        ]
        step = build(items, rng.choice([2**10, 2**18, 2**24]))
        for window in (None, 1, 7, 1000):
            at = 0
            for part in step.reads(window).parts:
                assert part.first == at < part.last
                at = part.last
            assert at == sum(item.count for item in items)


def test_a_group_pads_with_the_null_block_and_names_what_nobody_wrote() -> None:
    (group,) = build([scheduled(1, [7, 3], 5, 1), scheduled(2, [9], 2, 1)]).reads(None).parts
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [9, NULL, 7, 3]
    assert group.unwritten.tolist() == [3, 14, 15, 16 + 3, 16 + 14, 16 + 15]
    hidden = -math.inf
    assert group.mask.tolist() == [[[[0, 0, 0] + [hidden] * 5]], [[[0] * 6 + [hidden] * 2]]]


def test_padding_is_cheaper_than_another_group() -> None:
    """Lengths far apart are not padded to one another, and no group is larger than the cache likes."""
    block_bytes = 2**15
    lengths = [1] * 30 + [100] * 40
    items, block = [], 0
    for seq_id, length in enumerate(lengths):
        items.append(scheduled(seq_id, list(range(block, block + length)), length * BLOCK_SIZE - 1, 1))
        block += length
    groups = [part for part in build(items, block_bytes).reads(None).parts if isinstance(part, DecodeGroup)]
    for group in groups:
        padding = int((group.blocks == NULL).sum())
        assert padding * block_bytes <= plan_module.CALL_BYTES
        assert len(group.blocks) * block_bytes <= plan_module.MAX_GATHER_BYTES
    assert sum(int((group.blocks != NULL).sum()) for group in groups) == sum(lengths)


def test_a_window_reads_only_its_blocks() -> None:
    step = build([scheduled(1, list(range(10)), 30, 1), scheduled(2, list(range(20, 30)), 20, 6)])
    chunk, group = step.reads(6).parts
    assert isinstance(chunk, PromptChunk)
    assert chunk.window is not None
    blocks, mask = chunk.window
    assert blocks.tolist() == [23, 24, 25, 26]
    assert mask.shape == (1, 1, 6, 14)
    visible = (mask[0, 0] == 0).tolist()
    for row, position in enumerate(range(20, 26)):
        assert [12 + key for key in range(14) if visible[row][key]] == list(range(position - 5, position + 1))
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [6, 7]
    assert (group.mask[0, 0, 0] == 0).tolist() == [False, True, True, True, True, True, True, False]


def test_a_window_longer_than_everything_is_none() -> None:
    step = build([scheduled(1, [0, 1], 0, 6)])
    assert step.reads(6) is step.reads(None)
    assert step.reads(5) is not step.reads(None)


def test_shared_blocks_are_read_once_for_all_rows() -> None:
    """Rows of two chunks and a decode behind 32 common blocks; the rest of a context is read for one sequence alone."""
    common = list(range(100, 132))
    items = [
        scheduled(1, [*common, 1], 128, 3),
        scheduled(2, [*common, 2, 3], 130, 4),
        scheduled(3, [*common, 4], 129, 1),
        scheduled(4, [5], 0, 2),
    ]
    plan = build(items, plan_module.CALL_BYTES // 16).reads(None)
    assert [type(part) for part in plan.parts] == [PromptChunk, PromptChunk, PromptChunk, DecodeGroup]
    own, shared = plan.contexts
    assert own.rows == slice(3, 7)
    assert (own.blocks.tolist(), own.num_keys) == ([2], 2)
    assert isinstance(shared.rows, torch.Tensor)
    assert shared.rows.tolist() == [*range(7), 9]
    assert (shared.blocks.tolist(), shared.num_keys) == (common, 128)
    group = plan.parts[-1]
    assert isinstance(group, DecodeGroup)
    assert group.blocks.tolist() == [4]


def test_sharing_that_saves_less_than_a_call_is_left() -> None:
    common = list(range(100, 132))
    items = [scheduled(seq_id, [*common, seq_id], 129, 1) for seq_id in (1, 2)]
    assert build(items, plan_module.CALL_BYTES // 64).reads(None).contexts == []


# Two blocks to choose from at each depth: prefixes collide all the time, and a table is a path in a tree.
tables = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8).map(
    lambda paths: [[hash_path(path[: depth + 1]) for depth in range(len(path))] for path in paths]
)


def hash_path(path: list[int]) -> int:
    """A physical block per logical prefix, as in a prefix cache."""
    number = 1
    for step in path:
        number = 2 * number + step
    return number


@given(tables=tables, min_saving=st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_runs_follow_one_another_and_are_really_shared(tables: list[list[int]], min_saving: int) -> None:
    runs = shared_prefixes(tables, min_saving)
    for run in runs:
        assert len(run.members) >= 2
        assert len({tuple(tables[member][run.first : run.last]) for member in run.members}) == 1
        assert (len(run.members) - 1) * (run.last - run.first) >= min_saving
    for member in range(len(tables)):
        mine = sorted((run.first, run.last) for run in runs if member in run.members)
        assert [first for first, _ in mine] == [0, *(last for _, last in mine)][: len(mine)]
        assert all(last <= len(tables[member]) for _, last in mine)


@given(tables=tables)
@settings(max_examples=200, deadline=None)
def test_with_no_price_every_block_is_read_once(tables: list[list[int]]) -> None:
    runs = shared_prefixes(tables, 1)
    shared = sum(run.last - run.first for run in runs)
    alone = sum(
        len(table) - max([run.last for run in runs if member in run.members], default=0)
        for member, table in enumerate(tables)
    )
    assert shared + alone == len({block for table in tables for block in table})


def test_a_short_common_start_does_not_hide_long_shared_prefixes() -> None:
    """Two families behind one common block: sharing that block alone would not pay."""
    one, two = [1, *range(10, 20)], [1, *range(20, 30)]
    assert sorted(shared_prefixes([one, two, one, two], 8), key=lambda run: run.members) == [
        SharedPrefix([0, 2], 0, 11),
        SharedPrefix([1, 3], 0, 11),
    ]


def test_nested_runs() -> None:
    base = list(range(10))
    runs = shared_prefixes([[*base, 50, 51], [*base, 50, 51], base, [99]], 2)
    assert runs == [SharedPrefix([0, 1, 2], 0, 10), SharedPrefix([0, 1], 10, 12)]
