"""Steps in flight: answers in order, and the time that the oldest one has had."""

from __future__ import annotations

from array import array

import pytest
from support.clock import Clock
from support.engine.tables_alone import sequence_of

from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.scheduling.step_plan import NewSeq, StepPlan, StepResult


def plan(num_tokens: int) -> StepPlan:
    return StepPlan(finished=[], num_tokens=num_tokens)


def result(step: int, computed: int) -> StepResult:
    return StepResult(step, [], [], {}, computed, 0, 0)


def test_answers_are_due_in_order_and_with_all_tokens() -> None:
    steps, first, second = StepsInFlight(), plan(3), plan(1)
    with pytest.raises(WrongAnswer, match=r"StepResult\.step: must be 1, with 0 in flight, got 1"):
        steps.answered(result(1, 3))
    steps.add(first)
    steps.add(second)
    with pytest.raises(WrongAnswer, match=r"StepResult\.step: must be 1, with 2 in flight, got 2"):
        steps.answered(result(2, 1))
    with pytest.raises(WrongAnswer, match=r"StepResult\.computed_tokens: must be 3, as planned, got 4"):
        steps.answered(result(1, 4))
    assert steps.answered(result(1, 3))[0] is steps.oldest is first
    steps.pop()
    assert steps.answered(result(2, 1))[0] is second


def test_sequences_that_enter_behind_the_oldest_step() -> None:
    steps = StepsInFlight()
    assert steps.entering_later() == set()
    sequences = [sequence_of([1]) for _ in range(2)]
    for sequence in sequences:
        steps.add(StepPlan(new=[NewSeq(sequence, 5, array("I", [1]), array("i"), 0)], num_tokens=1))
    assert steps.entering_later() == {sequences[1]}
    steps.pop()
    assert steps.entering_later() == set()


def test_a_step_sent_ahead_waits_without_its_time_running() -> None:
    clock = Clock()
    steps = StepsInFlight(lambda: clock.now)
    assert steps.count_wait(9) == 0
    steps.add(plan(1))
    clock.now += 2
    steps.add(plan(1))
    assert steps.count_wait(9) == 2
    steps.pop()
    assert steps.count_wait(9) == 0
    clock.now += 1
    assert steps.count_wait(9) == 1
    steps.pop()
    assert steps.count_wait(9) == 0


def test_time_in_which_the_manager_stood_still_is_not_waited() -> None:
    clock = Clock()
    steps = StepsInFlight(lambda: clock.now)
    steps.add(plan(1))
    for seconds, waited in [(1, 1), (3600, 2), (0.5, 2.5), (1, 3.5)]:
        clock.now += seconds
        assert steps.count_wait(1) == waited


def test_a_new_epoch_counts_from_one() -> None:
    steps = StepsInFlight()
    for _ in range(2):
        steps.add(plan(1))
        steps.pop()
    steps.add(plan(1))
    steps.begin_epoch(5)
    assert (len(steps), steps.oldest) == (0, None)
    steps.add(plan(1))
    steps.answered(result(1, 1))


def test_a_turn_begins_when_the_step_before_was_answered_whatever_was_counted_since() -> None:
    clock = Clock()
    steps = StepsInFlight(lambda: clock.now)
    steps.add(plan(1))
    steps.add(plan(1))
    clock.now += 3
    steps.count_wait(1)
    assert steps.turn_s == 3
    steps.pop()
    clock.now += 2
    assert steps.turn_s == 2
