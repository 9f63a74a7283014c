"""Copies and entering sequences share the bytes of a step, and copies that do not fit are not listed."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output
from support.engine.tables_alone import cache, sequence_of, tables_of

from pagekv.kvmanager.engine.executor_wire import step_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.scheduling.block_tables import Arrival
from pagekv.kvmanager.scheduling.encoded_sizes import COLUMNS_BYTES, SEQUENCE_BYTES, IdBytes
from pagekv.kvmanager.scheduling.sequence import HOLDING
from pagekv.kvmanager.scheduling.step_plan import CopyKind, StepPlan
from pagekv.kvmanager.scheduling.step_room import StepRoom

# Of ids whose bytes nobody has told.
COPY_BYTES = 10


class Measured(Driver):
    """Refuses larger steps, as an executor does, and more copies than have room where all ids are long."""

    def _send(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert len(step_bytes(plan, 2**63, 2**63, ())) <= limits.max_step_bytes
        whole = limits.max_step_bytes - COLUMNS_BYTES * limits.max_running
        assert len(plan.copies) <= limits.max_running + whole // COPY_BYTES


def test_room_is_shared() -> None:
    room = StepRoom(1000 + COLUMNS_BYTES * 3, 3, IdBytes())
    assert (room.whole, room.left, room.copies_left) == (1000, 1000, 103)
    room.copies.add(CopyKind.COPY, [1, 2], [3, 4])
    assert (room.left, room.copies_left) == (1000, 101)
    room.copies.add(CopyKind.SWAP_OUT, [1, 2], [3, 4])
    room.entering = 905
    assert (room.left, room.copies_left) == (85, 8)
    room.entering = 2000
    assert room.copies_left == 0
    assert len(room.take_copies()) == 4
    assert (room.left, room.copies_left) == (1000, 103)


def test_victims_are_swapped_out_as_far_as_the_step_has_room() -> None:
    """The rest is computed again."""
    step = 60 * COPY_BYTES + SEQUENCE_BYTES + COLUMNS_BYTES * 4
    driver = Measured(
        block_size=1,
        num_blocks=256,
        max_running=4,
        host_blocks=512,
        preemption="swap",
        max_step_bytes=step,
        fork_sharing=False,
        prefix_cache=False,
    )
    request = driver.submit(list(range(20)), max_tokens=12, n=4)
    while request.sequences[3].num_tokens < 26:
        driver.step()
    driver.scheduler.preempt_all()
    driver.plan()
    copied = len(driver.plans[-1].copies)
    assert 60 <= copied <= 60 + 4 + SEQUENCE_BYTES // COPY_BYTES
    driver.drain()
    assert [output(request, index) for index in range(4)] == [expect(list(range(20)), 12)] * 4


@pytest.mark.parametrize("write_back", [False, True])
def test_sequences_that_come_in_together_copy_as_much_as_the_step_has_room_for(write_back: bool) -> None:
    pool = BlockPool(48, 2)
    tables = tables_of(pool, 96, max_step_bytes=16 * COPY_BYTES + 4 * COLUMNS_BYTES, write_back=write_back)
    prompts = [[10 * first + token for token in range(9)] for first in range(8)]
    for prompt in prompts:
        # Into the host pool, where every block follows the one before.
        digests, parents, sequence = _content(prompt)
        blocks, _ = tables.host.keep(digests, sequence.chunks(2, 0, 4), parents)
        tables.host.release(blocks)
    # Blocks whose contents would be written back.
    cache(pool, list(range(100, 196)))
    arrivals = [Arrival(sequence_of(prompt)) for prompt in prompts]
    assert tables.admit(arrivals, 0) == 0
    assert len(tables.take_copies()) <= 16 + 4
    # Four blocks each, and the one beside them that is not full; five more may be evicted.
    found = [arrival.sequence.num_computed for arrival in arrivals]
    assert found == ([8, 8, 0, 0, 0, 0, 0, 0] if write_back else [8] * 5 + [0] * 3)


def _content(prompt: list[int]) -> tuple[list[bytes | None], list[bytes], Any]:
    tables, sequence = tables_of(BlockPool(8, 2), 0), sequence_of(prompt)
    assert tables.admit([Arrival(sequence)], 0) == 0
    sequence.num_computed = len(prompt)
    tables.publisher.publish(sequence)
    return [*sequence.digests], [sequence.request.root, *sequence.digests[:3]], sequence


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fork_of_beams_that_a_step_has_no_room_for_is_refused(depth: int) -> None:
    """Where beams share nothing all of their blocks are copied, or computed again; others are left alone."""
    outputs = []
    for step in (40 * COPY_BYTES + 8 * COLUMNS_BYTES, 10**6):
        driver = Measured(
            block_size=1,
            num_blocks=400,
            max_running=8,
            max_step_bytes=step,
            depth=depth,
            fork_sharing=False,
            prefix_cache=False,
        )
        search = driver.submit(list(range(20)), max_tokens=6, n=4, beam_width=4)
        behind = driver.submit([7], max_tokens=30)
        driver.drain()
        assert finished(behind)
        assert not behind.preemptions
        assert bool(driver.scheduler.counters.preemptions) == (step < 10**6)
        outputs.append([output(search, index) for index in range(4)])
    assert outputs[0] == outputs[1]


def short_of_room(**options: Any) -> Measured:
    """Beams share nothing, victims are swapped, and a step has room for 58 copies."""
    return Measured(
        block_size=1,
        max_running=8,
        max_step_bytes=50 * COPY_BYTES + 8 * COLUMNS_BYTES,
        depth=1,
        fork_sharing=False,
        prefix_cache=False,
        preemption="swap",
        **options,
    )


def test_a_fork_is_refused_where_what_was_swapped_out_for_it_left_no_room() -> None:
    driver = short_of_room(num_blocks=80, host_blocks=80)
    behind = driver.submit(list(range(30)), max_tokens=10, priority=1)
    driver.step()
    search = driver.submit(list(range(14)), max_tokens=4, n=4, beam_width=4)
    driver.drain()
    assert finished(search)
    assert output(behind) == expect(list(range(30)), 10)
    assert behind.preemptions


def test_a_fork_takes_no_more_victims_once_the_first_has_used_up_the_room() -> None:
    driver = short_of_room(num_blocks=120, host_blocks=200, priority_aging=4)
    lengths = (6, 6, 6, 6, 30)
    behind = [driver.submit([50 + at] * length, max_tokens=16, priority=1) for at, length in enumerate(lengths)]
    while not all(request.sequences[0].state in HOLDING for request in behind):
        driver.step()
    search = driver.submit(list(range(14)), max_tokens=4, n=4, beam_width=4)
    driver.step()
    assert search.preemptions
    assert [request.preemptions for request in behind] == [0, 0, 0, 0, 1]
    driver.drain()
    assert finished(search)
    assert all(map(finished, behind))


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("fork_sharing", [False, True])
@pytest.mark.parametrize("recomputed", [0, 1])
def test_a_fork_may_be_made_as_long_as_there_is_room_for_each_of_its_copies(
    write_back: bool, fork_sharing: bool, recomputed: int
) -> None:
    """Three children of 8 tokens in blocks of 2. A child shares the full blocks of all but the tokens that it computes
    itself, where sharing is on; each other block is a copy, and another one where what it held is written back.
    """
    shared = (3 if recomputed else 4) if fork_sharing else 0
    most = 3 * (4 - shared) * (2 if write_back else 1)
    children = [sequence_of(list(range(8))) for _ in range(3)]
    for room in range(max(0, most - 1), most + 1):
        step = room * COPY_BYTES + 4 * COLUMNS_BYTES
        tables = tables_of(BlockPool(48, 2), 16, max_step_bytes=step, write_back=write_back, fork_sharing=fork_sharing)
        # The columns have a copy for each sequence.
        tables.room.copies.add(CopyKind.COPY, [0] * 4, [1] * 4)
        assert tables.may_fork(children, recomputed=recomputed) == (room >= most), room


def test_without_a_host_pool_nothing_is_set_aside_for_evicted_blocks() -> None:
    children = [sequence_of(list(range(8))) for _ in range(3)]
    step = 12 * COPY_BYTES + 4 * COLUMNS_BYTES
    tables = tables_of(BlockPool(48, 2), 0, max_step_bytes=step, write_back=True, fork_sharing=False)
    tables.room.copies.add(CopyKind.COPY, [0] * 4, [1] * 4)
    assert tables.may_fork(children, recomputed=0)
