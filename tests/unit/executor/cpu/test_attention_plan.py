"""The plan of a step: rows, slots, and what sequences share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.scheduled_items import BLOCK_SIZE, COMMON_BLOCKS, next_decodes, scheduled

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


def content(plan: CpuAttentionPlan) -> dict[int, list[object]]:
    """By seq_id: what the plan says about the row of a sequence that decodes."""
    columns = [each.flatten().tolist() for each in (plan.input_ids, plan.position_ids, *plan.slots)]
    assert [row for row, _ in plan.sampling] == list(range(len(columns[0])))
    assert [state for _, state in plan.sampling] == [row.item.state for row in plan.step.rows]
    return {
        row.item.state.seq_id: [row.item, row.shared, *column]
        for row, *column in zip(plan.step.rows, *columns, strict=True)
    }


def test_a_step_of_decodes_advances_to_the_next_one() -> None:
    """Over several blocks, and with a prefix that two sequences share."""
    lengths = [131, 140, 2, 7, 12]
    items = []
    for number, length in enumerate(lengths):
        own = [1000 * number + place for place in range(length // BLOCK_SIZE + 1)]
        table = [*COMMON_BLOCKS, *own[len(COMMON_BLOCKS) :]] if number < 2 else own
        items.append(scheduled(number, table, length, 1))
    plan = build(items)
    for number in range(1, 3 * BLOCK_SIZE):
        items = next_decodes(items)
        assert plan.advance(items)
        assert content(plan) == content(build(items))
        assert plan.num_advances == number
        reached = {row for row, each in enumerate(plan.step.rows) if each.item.start % BLOCK_SIZE == 0}
        assert set(plan.entered) == reached
        assert plan.effective_window(140 + number) == 140 + number
        assert plan.effective_window(141 + number) is None


def test_other_steps_are_no_next_step() -> None:
    """And leave the plan as it is."""

    def decodes() -> list[Scheduled]:
        return [scheduled(1, [1, 2, 3, 4], 6, 1), scheduled(2, [5, 6, 7], 4, 1)]

    items = decodes()
    plan, other = build(items), decodes()[0]
    before, following = content(plan), next_decodes(items)
    first, second = following
    for wrong in (
        items,
        [second, first],
        [first],
        [*following, other],
        [Scheduled(other.state, 7, 1), second],
        [Scheduled(first.state, 8, 1), second],
        [Scheduled(first.state, 7, 2), second],
    ):
        assert not plan.advance(wrong)
        assert content(plan) == before
    # Nor does a step with a prompt have a next one.
    chunk = scheduled(3, [8], 0, 1, known=2)
    assert not build([*items, chunk]).advance([*following, Scheduled(chunk.state, 1, 1)])
    assert plan.advance(following)


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
