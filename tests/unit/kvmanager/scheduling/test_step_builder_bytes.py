"""A step stays below what an executor takes: sequences whose bytes do not fit enter in the next step."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine.scheduler_driver import VOCAB, Driver, expect, finished, output

from pagekv.kvmanager.scheduling.encoded_sizes import COLUMNS_BYTES, LISTS_BYTES, SEQUENCE_BYTES
from pagekv.kvmanager.scheduling.sequence import LiveRequest

# Of ids whose bytes nobody has told.
ID_BYTES = 5


def room_for(entering: int) -> dict[str, Any]:
    """Settings of a driver whose steps have so many bytes for what enters."""
    return {"max_running": 8, "max_step_bytes": entering + COLUMNS_BYTES * 8}


@pytest.mark.parametrize("depth", [1, 2])
def test_long_prompts_that_hit_one_prefix_enter_in_several_steps(depth: int) -> None:
    """In order, as many as fit and never more; one alone always."""
    prefix = [index % VOCAB for index in range(80)]
    entry = SEQUENCE_BYTES + ID_BYTES * (81 + 21)
    for most, batches in ((10**9, [7]), (3 * entry, [3, 3, 1]), (3 * entry - 1, [2, 2, 2, 1]), (1, [1] * 7)):
        driver = Driver(num_blocks=256, max_batch_tokens=128, depth=depth, **room_for(most))
        driver.submit(prefix, max_tokens=1)
        driver.drain()
        before = len(driver.plans)
        requests = [driver.submit([*prefix, index], max_tokens=12) for index in range(7)]
        driver.drain()
        entered = [[new.sequence.request for new in plan.new] for plan in driver.plans[before:] if plan.new]
        assert [len(plan) for plan in entered] == batches
        assert [request for plan in entered for request in plan] == requests
        for request in requests:
            assert output(request) == expect(request.command.prompt_ids, 12)


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_forks_beams_and_what_returns_enter_one_by_one(host_blocks: int) -> None:
    driver = Driver(host_blocks=host_blocks, preemption="swap" if host_blocks else "recompute", **room_for(1))
    requests = [
        driver.submit(list(range(19)), max_tokens=20, n=4),
        driver.submit(list(range(30, 49)), max_tokens=12, beam_width=3, n=2),
        driver.submit([7, 8, 9], max_tokens=20),
    ]
    for step in range(30):
        if step % 8 == 7:
            driver.scheduler.preempt_all()
        driver.step()
    driver.lose_executor()
    driver.drain()
    assert all(finished(request) for request in requests)
    assert max(len(plan.new) for plan in driver.plans) == 1
    wanted = expect(list(range(19)), 20)
    assert [output(requests[0], index) for index in range(4)] == [wanted] * 4


def test_copies_of_the_step_count() -> None:
    """With a host pool, room is kept for blocks that are copied in and out for the sequence that enters next."""
    entered = []
    both, copies = 2 * (SEQUENCE_BYTES + ID_BYTES * (81 + 21)), 2 * 21 * 2 * ID_BYTES
    for host_blocks, room in ((0, both), (64, both), (64, both + copies - 1), (64, both + copies)):
        driver = Driver(
            num_blocks=64, host_blocks=host_blocks, preemption="swap", max_batch_tokens=256, **room_for(room)
        )
        requests = [driver.submit([index] * 81, max_tokens=6) for index in range(2)]
        driver.drain()
        entered.append(max(len(plan.new) for plan in driver.plans))
        assert all(finished(request) for request in requests)
    assert entered == [2, 1, 1, 2]


@pytest.mark.parametrize("fields", [{"min_tokens": 1}, {"logit_bias": {3: 1.0}}])
def test_ids_that_are_banned_or_biased_count(fields: dict[str, Any]) -> None:
    """As many as there may be; a step that just has room for two sequences without has none for two with."""
    plain = SEQUENCE_BYTES + ID_BYTES * (9 + 3)
    for lists, room, most in (({}, 2 * plain, 2), (fields, 2 * plain, 1), (fields, 2 * plain + 2 * LISTS_BYTES, 2)):
        driver = Driver(**room_for(room))
        for first in (1, 2):
            driver.submit([first] * 9, max_tokens=2, **lists)
        driver.drain()
        assert max(len(plan.new) for plan in driver.plans) == most


@pytest.mark.parametrize("room", [10**6, 100])
def test_none_enters_beside_copies_that_leave_it_no_room(room: int) -> None:
    """In the step in which others are swapped out; the columns have room for 8 of those copies."""
    driver = Driver(host_blocks=64, preemption="swap", depth=1, **room_for(room))
    driver.submit([1] * 60, max_tokens=8)
    driver.step()
    driver.scheduler.preempt_all()
    driver.submit([2, 3], max_tokens=1, priority=-1)
    driver.plan()
    plan = driver.plans[-1]
    assert len(plan.copies) > 8
    assert bool(plan.new) == (room > 100)
    driver.drain()
    assert all(map(finished, driver.requests))


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_enters_beside_beams_that_come_back_again_and_again(depth: int) -> None:
    """A step has room for two of the longest sequences at least; here for three."""
    prompt = [index % VOCAB for index in range(80)]
    entry = SEQUENCE_BYTES + ID_BYTES * (81 + 21)
    room: dict[str, Any] = {"max_running": 32, "max_step_bytes": 3 * entry + 32 * COLUMNS_BYTES}
    driver = Driver(num_blocks=512, max_batch_tokens=256, depth=depth, **room)
    searches = [driver.submit([first, *prompt], max_tokens=40, n=4, beam_width=4) for first in range(4)]
    while len(driver.plans) < 30:
        driver.step()
    assert not any(map(finished, searches))
    begun = len(driver.plans)
    late = [driver.submit([9, *prompt], max_tokens=1), driver.submit([1, 2, 3], max_tokens=1)]
    while not all(map(finished, late)):
        driver.step()
    assert len(driver.plans) - begun <= 8
    assert not all(map(finished, searches))
    driver.drain()
    alone = Driver(num_blocks=512, max_batch_tokens=256, depth=depth, max_running=32)
    undisturbed = [alone.submit([first, *prompt], max_tokens=40, n=4, beam_width=4) for first in range(4)]
    alone.drain()
    assert [output(search) for search in searches] == [output(search) for search in undisturbed]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_needs_most_of_a_step_enters_beside_beams_that_come_back(depth: int) -> None:
    """Alone for that step, while the searches, whose beams leave no step less than half full, go on."""
    prompt = [index % VOCAB for index in range(40)]
    entry = SEQUENCE_BYTES + ID_BYTES * (161 + 41)
    room: dict[str, Any] = {"max_running": 32, "max_step_bytes": entry + 32 * COLUMNS_BYTES}
    driver = Driver(num_blocks=512, max_batch_tokens=256, depth=depth, **room)
    searches = [driver.submit([first, *prompt], max_tokens=40, n=4, beam_width=4) for first in range(4)]
    while len(driver.plans) < 30:
        driver.step()
    begun = len(driver.plans)
    late = driver.submit([index % VOCAB for index in range(1, 161)], max_tokens=1)
    while not finished(late):
        driver.step()
    assert len(driver.plans) - begun <= 8
    assert not all(map(finished, searches))
    driver.drain()
    assert all(map(finished, searches))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("entries", [1.0, 1.5, 3.0])
def test_beams_return_however_many_newcomers_fill_the_steps(depth: int, entries: float) -> None:
    """Newcomers and beams go first in turns, and neither is starved: a search of 40 tokens ends."""
    prompt = [index % VOCAB for index in range(160)]
    entry = SEQUENCE_BYTES + ID_BYTES * (161 + 41)
    room: dict[str, Any] = {"max_running": 32, "max_step_bytes": int(entries * entry) + 32 * COLUMNS_BYTES}
    driver = Driver(num_blocks=1024, max_batch_tokens=256, depth=depth, **room)
    driver.submit(prompt, max_tokens=1)
    driver.drain()
    search = driver.submit([5] + [1] * 40, max_tokens=40, n=4, beam_width=4)
    late: list[LiveRequest] = []
    while not finished(search) and len(driver.plans) < 400:
        while driver.scheduler.num_waiting < 6:
            late.append(driver.submit([*prompt, len(late) % VOCAB], max_tokens=1))
        driver.step()
    assert finished(search)
    assert sum(map(finished, late)) > 50


def test_a_long_head_and_beams_go_first_in_turns() -> None:
    """Beams return behind a head that went first, as far as there is room; and before newcomers that always had it."""
    prompt = [index % VOCAB for index in range(40)]
    room = 3 * (SEQUENCE_BYTES + ID_BYTES * (81 + 21))
    driver = Driver(
        num_blocks=512, max_batch_tokens=512, depth=1, max_running=16, max_step_bytes=room + 16 * COLUMNS_BYTES
    )
    search = driver.submit(prompt, max_tokens=40, n=2, beam_width=2)
    while len(driver.plans) < 6:
        driver.step()

    def newest() -> list[bool]:
        """Whether each sequence that enters next is a beam, in order."""
        driver.step()
        return [new.sequence.request is search for new in driver.plans[-1].new]

    assert newest() == [True, True]
    short = driver.submit([7], max_tokens=1)
    assert newest() == [True, True, False]
    head = driver.submit([9] * 150, max_tokens=1)
    assert newest() == [True, True]
    assert newest() == [False, True]
    assert finished(short)
    assert finished(head)
    # The other beam comes a step later.
    assert newest() == [True]
    driver.submit([8], max_tokens=1)
    assert newest() == [True, True, False]
