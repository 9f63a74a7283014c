"""The plan of a step: rows, slots, and what sequences share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.scheduled_items import BLOCK_SIZE, scheduled

from pagekv.executor.backend.interface import Scheduled
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan, SharedPrefix, shared_prefixes


def build(items: list[Scheduled]) -> CpuAttentionPlan:
    return CpuAttentionPlan(items, BLOCK_SIZE, 2**15)


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


def test_a_window_longer_than_everything_is_none() -> None:
    step = build([scheduled(1, [0, 1], 0, 6)])
    assert (step.effective_window(6), step.effective_window(5), step.effective_window(None)) == (None, 5, None)


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


class _Block(int):
    """A block whose comparisons are counted; none is the same object as another one, as in tables of messages."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        _Block.compared += 1
        return int.__eq__(self, other) is True


@pytest.mark.parametrize("num_turns", [16, 64])
def test_a_block_is_compared_a_few_times_however_many_conversations_part_behind_it(num_turns: int) -> None:
    """One conversation at each of its turns, as a benchmark of many turns sends it all at once."""
    conversation = range(20 * num_turns)
    tables: list[list[int]] = [
        [*map(_Block, conversation[: 20 * turn]), _Block(10**6 + turn)] for turn in range(1, num_turns + 1)
    ]
    _Block.compared = 0
    found = shared_prefixes(tables, 1)
    assert len(found) == num_turns - 1
    assert _Block.compared <= 4 * sum(map(len, tables))
