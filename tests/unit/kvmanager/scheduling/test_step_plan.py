"""A step's plan: sequences as they stood, one step ahead of the results."""

from __future__ import annotations

import pytest
from support.engine.integrity import pending
from support.engine.scheduler_driver import Driver, expect, output

from pagekv.kvmanager.scheduling.step_plan import Admitted, CopyKind, CopyList
from pagekv.kvmanager.scheduling.step_room import StepRoom


def test_the_next_step_is_planned_while_one_is_in_flight() -> None:
    driver = Driver(depth=2)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=4)
    assert driver.plan() is not None
    ahead = driver.plan()
    assert ahead is not None
    assert ahead.num_tokens == 1
    assert (pending(request.sequences[0]), len(request.sequences[0].token_ids)) == (2, 5)
    driver.drain()
    assert output(request) == expect([1, 2, 3, 4, 5], 4)


def test_nothing_is_computed_past_max_tokens() -> None:
    driver = Driver(depth=2)
    driver.submit([1, 2, 3], max_tokens=5)
    driver.drain()
    assert driver.executor.computed_tokens == 3 + 5 - 1


def test_a_new_sequence_is_told_as_it_stood_when_the_step_was_planned() -> None:
    driver = Driver(depth=2)
    (sequence,) = driver.submit([1, 2, 3, 4, 5], max_tokens=9).sequences
    plan = driver.plan()
    assert plan is not None
    (new,) = plan.new
    for _ in range(5):
        driver.step()
    assert new.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert new.block_ids == sequence.block_table[:2]
    assert len(sequence.block_table) > 2


def test_a_plan_says_who_was_admitted_and_what_the_prefix_cache_lacked() -> None:
    """As it was before the sequences published their own blocks."""
    driver = Driver(block_size=4, depth=1)

    def admitted(prompt: list[int]) -> Admitted:
        request = driver.submit(prompt, max_tokens=1)
        plan = driver.plan()
        assert plan is not None
        driver.drain()
        (found,) = plan.admitted
        assert found.sequence is request.sequences[0]
        return found

    first = admitted([*range(10)])
    assert (first.hit_blocks, first.missed, first.shared_tokens) == (0, first.sequence.digests[0], 0)
    # Two blocks hit; of a partial one nothing can be missed.
    again = admitted([*range(10)])
    assert (again.hit_blocks, again.missed) == (2, None)
    # One hit, and of the next block two tokens are as in a cached one.
    parted = admitted([0, 1, 2, 3, 4, 5, 90, 91, 92])
    assert (parted.hit_blocks, parted.missed, parted.shared_tokens) == (1, parted.sequence.digests[1], 2)
    # The last block is cached, and computed all the same, for its last token is sampled from.
    whole = admitted([*range(8)])
    assert (whole.hit_blocks, whole.missed) == (1, None)


@pytest.mark.parametrize(("length", "hits"), [(13, 3), (12, 2), (11, 2)])
def test_blocks_that_come_back_from_the_host_pool_are_hits(length: int, hits: int) -> None:
    """The device has evicted all three, so nothing hits there, and nothing is missed either; of twelve tokens the last
    block is in the host pool, and computed all the same.
    """
    driver = Driver(num_blocks=4, block_size=4, host_blocks=16, write_back=True, depth=1)
    for prompt in ([*range(12)], [*range(30, 45)], [*range(60, 75)]):
        driver.submit(prompt, max_tokens=1)
        driver.drain()
    again = driver.submit([*range(length)], max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    (found,) = plan.admitted
    assert again.sequences[0].cached_tokens == hits * 4
    assert (found.hit_blocks, found.missed, found.shared_tokens) == (hits, None, 0)
    driver.drain()


def test_blocks_of_the_host_pool_for_whose_copies_a_step_has_no_room_are_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such blocks are computed, and would be counted as evicted, because the device lacks them."""
    driver = Driver(num_blocks=4, block_size=4, host_blocks=16, write_back=True, depth=1)
    for prompt in ([*range(12)], [*range(30, 45)], [*range(60, 75)]):
        driver.submit(prompt, max_tokens=1)
        driver.drain()
    # Four for the blocks that are written back, and one for a block that returns.
    monkeypatch.setattr(StepRoom, "copies_left", 5)
    driver.submit([*range(13)], max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    (found,) = plan.admitted
    assert (found.hit_blocks, found.missed, found.shared_tokens) == (1, None, 0)
    driver.drain()


def test_what_follows_blocks_of_the_host_pool_is_missed() -> None:
    driver = Driver(num_blocks=4, block_size=4, host_blocks=16, write_back=True, depth=1)
    for prompt in ([*range(12)], [*range(30, 45)], [*range(60, 75)]):
        driver.submit(prompt, max_tokens=1)
        driver.drain()
    parted = driver.submit([*range(8), 90, 91, 92, 93, 94], max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    (found,) = plan.admitted
    assert (found.hit_blocks, found.missed, found.shared_tokens) == (2, parted.sequences[0].digests[2], 0)
    driver.drain()


def test_copies_are_runs_of_one_kind_in_order() -> None:
    copies = CopyList()
    assert (len(copies), list(copies), bool(copies)) == (0, [], False)
    copies.add(CopyKind.SWAP_OUT, [1, 2], [7, 8])
    copies.add(CopyKind.SWAP_OUT, [3], [9])
    copies.add(CopyKind.COPY, [4], [5])
    copies.add(CopyKind.SWAP_OUT, [], [])
    assert [run.kind for run in copies.runs] == [CopyKind.SWAP_OUT, CopyKind.COPY]
    assert len(copies) == 4
    pairs = [(copy.kind, copy.source, copy.destination) for copy in copies]
    out, copy = CopyKind.SWAP_OUT, CopyKind.COPY
    assert pairs == [(out, 1, 7), (out, 2, 8), (out, 3, 9), (copy, 4, 5)]
    taken = copies.take()
    assert (list(CopyList(taken)), list(copies)) == (list(taken), [])
    copies.add(copy, [1], [2])
    assert (len(taken), len(copies)) == (4, 1)
