"""Times of steps are learnt, and bounds follow from them."""

from __future__ import annotations

import random

import pytest

from pagekv.kvmanager.engine.step_times import LEAST_US, MOST_BASES, VISITED_BASES, StepTimes
from pagekv.kvmanager.scheduling.step_plan import StepPlan

MODELS = [(3600, 300, 120), (1300, 170, 48), (10_000, 20, 60)]


def plan(decodes: int, prompts: int) -> StepPlan:
    return StepPlan(num_decodes=decodes, num_tokens=decodes + prompts)


def learnt(model: tuple[float, float, float], held_up: float = 0.0) -> StepTimes:
    """The knowledge after some hundred steps of such a base and such costs, of which this share was held up."""
    chance, times = random.Random(1), StepTimes(2048)
    for _ in range(300):
        step = plan(chance.randrange(40), chance.choice([0, 0, 40, 100]) + 1)
        us = true_us(model, step) * chance.lognormvariate(0, 0.1)
        times.learn(step, int(us * (20 if chance.random() < held_up else 1)))
    return times


def true_us(model: tuple[float, float, float], step: StepPlan) -> float:
    base, decode, prompt = model
    return base + decode * step.num_decodes + prompt * (step.num_tokens - step.num_decodes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("held_up", [0.0, 0.1])
def test_the_time_of_a_step_is_learnt_though_some_are_held_up(
    model: tuple[float, float, float], held_up: float
) -> None:
    times = learnt(model, held_up)
    for step in (plan(0, 32), plan(32, 0), plan(24, 100), plan(60, 300)):
        assert times.expected_us(step) == pytest.approx(true_us(model, step), rel=0.25)


def test_the_first_step_is_all_that_is_known_at_first() -> None:
    times = StepTimes(2048)
    assert times.expected_us(plan(4, 0)) == 0
    times.learn(plan(4, 0), 5000)
    assert times.expected_us(plan(4, 0)) == pytest.approx(5000, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_a_bounded_step_takes_a_few_times_what_every_step_costs(model: tuple[float, float, float]) -> None:
    times = learnt(model)
    bound, most = times.bound(), max(MOST_BASES * model[0], LEAST_US)
    whole = true_us(model, plan(0, bound.tokens))
    decodes = true_us(model, plan(bound.num_decodes(1), 0))
    assert whole == pytest.approx(most, rel=0.3)
    assert decodes == pytest.approx(most, rel=0.3)
    short = true_us(model, plan(0, bound.visited))
    assert short == pytest.approx(max(VISITED_BASES * model[0], LEAST_US), rel=0.3)


def test_the_cost_of_steps_that_are_all_alike_is_the_base_so_they_grow_until_they_differ() -> None:
    times = StepTimes(2048)
    for prompts in range(400):
        times.learn(plan(1, prompts % 9), 12_000)
    assert times.bound().num_decodes(1) > 20


def test_steps_are_told_where_those_with_more_decodes_took_less() -> None:
    """By chance, for something else on the machine; a cost that is negative is nothing that a bound could go by."""
    times, chance, model = StepTimes(2048), random.Random(1), (20_000, -360, 80)
    for _ in range(400):
        step = plan(33 - chance.randrange(4), chance.choice([0, 0, 32, 256]))
        times.learn(step, int(true_us(model, step)))
    for step in (plan(33, 0), plan(32, 256)):
        assert times.expected_us(step) == pytest.approx(true_us(model, step), rel=0.15)


def test_steps_that_cost_nothing_or_nothing_more_for_prompts_have_a_bound_too() -> None:
    times = StepTimes(2048)
    times.learn(plan(1, 0), 0)
    assert 2048 // 32 <= times.bound().tokens <= 2048
    for decodes in range(1, 200):
        times.learn(plan(decodes % 7, 1), 100_000)
    assert times.bound().tokens >= 1024


def test_the_next_step_is_planned_sooner_where_the_executor_stood_still_and_later_where_not() -> None:
    times, step = StepTimes(2048), plan(8, 0)
    times.learn(step, 20_000)
    for _ in range(200):
        times.learn_idle(step, 0)
    assert times.lead_us == 0
    times.learn_idle(step, 3000)
    once = times.lead_us
    assert once > 0
    for _ in range(200):
        times.learn_idle(step, 3000)
    assert once < times.lead_us <= 20_000


@pytest.mark.parametrize("times_slower", [3, 10])
def test_other_costs_are_learnt_within_some_steps(times_slower: int) -> None:
    """As of another executor, or of one that heat slows down."""
    base, decode, prompt = MODELS[0]
    slow = (base * times_slower, decode * times_slower, prompt * times_slower)
    chance, times = random.Random(2), learnt(MODELS[0])
    for _ in range(40):
        step = plan(chance.randrange(40), chance.choice([0, 0, 40, 100]) + 1)
        times.learn(step, int(true_us(slow, step)))
    assert times.expected_us(plan(20, 50)) == pytest.approx(true_us(slow, plan(20, 50)), rel=0.3)


def test_a_step_that_computed_nothing_tells_nothing() -> None:
    times = StepTimes(2048)
    times.learn(plan(0, 0), 0)
    times.learn(plan(4, 0), 5000)
    assert times.expected_us(plan(4, 0)) == pytest.approx(5000, rel=0.01)
