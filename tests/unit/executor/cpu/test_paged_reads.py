"""Reads from the block pool: together every row reads each position that it sees, once, where its own table has it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from support.executor.scheduled_items import BLOCK_SIZE, COMMON_BLOCKS, behind_common_blocks, next_decodes, scheduled

from pagekv.executor.backend.interface import Scheduled
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.paged_reads import RUN_QUERIES, PagedReads, PagedRuns, paged_reads


def planned(items: list[Scheduled], window: int | None) -> tuple[CpuAttentionPlan, PagedReads]:
    """Sharing a single block is worth it."""
    plan = CpuAttentionPlan(items, BLOCK_SIZE, 2**20)
    return plan, paged_reads(plan.step, BLOCK_SIZE, window, 2, 1)


def seen_by(runs: PagedRuns) -> dict[int, list[int]]:
    """By row: the slots that it sees, as block * BLOCK_SIZE + offset. Asserts what `PagedRuns` promises."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, offset in enumerate(runs.offsets.tolist()):
        places = slice(int(runs.firsts[number]), int(runs.firsts[number + 1]))
        assert 0 < places.stop - places.start <= min(runs.most_rows, RUN_QUERIES // 2)
        for ordered in (runs.begins[places], runs.ends[places]):
            assert ordered.tolist() == sorted(ordered.tolist())
        for place in range(places.start, places.stop):
            row = int(runs.rows[place])
            assert row not in found
            for position in range(int(runs.begins[place]), int(runs.ends[place])):
                block = int(runs.tables[offset + position // BLOCK_SIZE])
                found[row].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    return found


def all_seen(reads: PagedReads) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for runs in [reads.chunks, *reads.prefixes]:
        if runs is not None:
            for row, slots in seen_by(runs).items():
                found[row] += slots
    if (decodes := reads.decodes) is not None:
        for row in range(decodes.first, decodes.last):
            at = row - decodes.first
            for position in range(int(decodes.begins[at]), int(decodes.ends[at])):
                block = int(decodes.tables[int(decodes.offsets[at]) + position // BLOCK_SIZE])
                found[row].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    return found


def test_every_row_reads_what_it_sees_once() -> None:
    rng = random.Random(0)
    for _ in range(60):
        trunk = list(range(1000, 1020))
        items = []
        for seq_id in range(rng.randint(1, 10)):
            # Tables leave a common trunk, or a branch of it, at different depths.
            shared = trunk[: rng.randrange(20)]
            shared += [block + 100 for block in trunk[len(shared) : len(shared) + rng.choice([0, 3])]]
            table = shared + [100 * seq_id + block for block in range(100 - len(shared))]
            items.append(scheduled(seq_id, table, rng.randrange(150), rng.choice([1, 1, 2, 30, 150])))
        for window in (None, 1, 7):
            plan, reads = planned(items, window)
            assert window is None or not reads.prefixes
            found = all_seen(reads)
            for row in plan.step.rows:
                for place in range(row.item.count):
                    end = row.item.start + place + 1
                    begin = 0 if window is None else max(0, end - window)
                    expected = [
                        row.item.state.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                        for position in range(begin, end)
                    ]
                    assert sorted(found[row.first + place]) == sorted(expected)


def test_sampled_rows_alone_read_what_they_see_once() -> None:
    rng = random.Random(0)
    prefixes = 0
    for _ in range(60):
        items = []
        for seq_id in range(rng.randint(1, 10)):
            table = [*range(1000, 1000 + rng.choice([0, 12, 20])), *range(100 * seq_id, 100 * seq_id + 100)]
            item = scheduled(seq_id, table, rng.randrange(150), rng.choice([1, 1, 2, 30, 150]))
            if rng.random() < 0.3:
                # More is known than is computed in this step: nothing is sampled.
                item.state.token_ids.append(1)
            items.append(item)
        plan, _ = planned(items, None)
        for window in (None, 7):
            reads = paged_reads(plan.sampled, BLOCK_SIZE, window, 2, 1)
            assert reads.chunks is None
            prefixes += len(reads.prefixes)
            found = all_seen(reads)
            assert len(found) == len(plan.sampling)
            for number, (_, state) in enumerate(plan.sampling):
                end = len(state.token_ids)
                positions = range(0 if window is None else max(0, end - window), end)
                expected = [state.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]
                assert sorted(found[number]) == sorted(expected)
    assert prefixes


def test_a_shared_prefix_is_read_for_all_of_its_rows_together() -> None:
    _, reads = planned(behind_common_blocks(), None)
    (prefix,) = reads.prefixes
    assert prefix.firsts.tolist() == [0, 8]
    assert prefix.rows.tolist() == [*range(7), 9]
    assert prefix.tables.tolist() == COMMON_BLOCKS
    assert reads.decodes is not None
    assert (reads.decodes.begins.tolist(), reads.decodes.ends.tolist()) == ([128], [130])


def test_prefixes_that_no_row_has_both_of_are_read_together() -> None:
    left, right, deeper = list(range(8)), list(range(20, 28)), [40, 41]
    items = [scheduled(seq_id, [*left, *deeper, 50 + seq_id], 40, 1) for seq_id in (1, 2)]
    items += [scheduled(3, [*left, 60], 32, 1)]
    items += [scheduled(seq_id, [*right, 50 + seq_id], 33, 1) for seq_id in (4, 5)]
    _, reads = planned(items, None)
    # Both trunks, then what two of the first one's sequences share behind it.
    assert [len(level.firsts) - 1 for level in reads.prefixes] == [2, 1]


def test_runs_with_more_to_do_come_first() -> None:
    _, reads = planned([scheduled(1, [1], 0, 3), scheduled(2, list(range(10, 110)), 0, 300)], None)
    assert reads.chunks is not None
    assert reads.chunks.firsts.diff().tolist() == [128, 44, 128, 3]
    ends = [int(reads.chunks.ends[int(last) - 1]) for last in reads.chunks.firsts[1:]]
    assert ends == [256, 300, 128, 3]


def test_few_runs_are_divided_among_threads_and_many_queries_make_short_ones() -> None:
    plan, _ = planned([scheduled(1, list(range(100)), 0, 100)], None)
    for group, least, lengths in ((2, 1, [100]), (2, 4, [32, 32, 32, 4]), (64, 1, [4] * 25), (300, 1, [1] * 100)):
        reads = paged_reads(plan.step, BLOCK_SIZE, None, group, least)
        assert reads.chunks is not None
        assert sorted(reads.chunks.firsts.diff().tolist()) == sorted(lengths)
    # Rows of eight and fewer stay together.
    plan, _ = planned([scheduled(1, list(range(100)), 0, 9)], None)
    reads = paged_reads(plan.step, BLOCK_SIZE, None, 2, 99)
    assert reads.chunks is not None
    assert sorted(reads.chunks.firsts.diff().tolist()) == [1, 8]


def seen_by_sequences(plan: CpuAttentionPlan, reads: PagedReads) -> dict[int, list[int]]:
    """`all_seen` of decodes, in the order of slots: rows of a new plan may be in another order."""
    return {plan.step.rows[row].item.state.seq_id: sorted(slots) for row, slots in all_seen(reads).items()}


@pytest.mark.parametrize("window", [None, 9])
def test_reads_of_decodes_advance_as_long_as_there_is_room(window: int | None) -> None:
    items = [
        scheduled(1, [*COMMON_BLOCKS, 1], 130, 1),
        scheduled(2, [*COMMON_BLOCKS, 2], 128, 1),
        scheduled(3, [3, 30], 5, 1),
    ]
    plan, reads = planned(items, window)
    for _ in range(BLOCK_SIZE):
        items = next_decodes(items)
        assert plan.advance(items)
        assert reads.advance(plan.step, plan.entered, BLOCK_SIZE, window)
        assert seen_by_sequences(plan, reads) == seen_by_sequences(*planned(items, window))
    # 33 blocks of the first two are followed by room for 7, the 2 blocks of the third by room for 6.
    steps = 0
    while plan.advance(items := next_decodes(items)):
        if not reads.advance(plan.step, plan.entered, BLOCK_SIZE, window):
            break
        steps += 1
    assert items[2].start == 8 * BLOCK_SIZE
    assert steps == 8 * BLOCK_SIZE - 1 - (5 + BLOCK_SIZE)
