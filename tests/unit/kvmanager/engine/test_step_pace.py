"""The next step is planned at once, or just in time while tenants compete; and what a quiet tenant has from it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import cast

import pytest
from support.clock import Clock
from support.engine.flooded_engine import FloodedEngine, Seen

from pagekv.kvmanager.engine.step_pace import StepPace
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult

STEP = StepPlan(num_decodes=4, num_tokens=4)


@dataclass
class Asked:
    """Stands in for a scheduler."""

    competing: bool
    bounds: list[StepBound] = field(default_factory=list)

    def set_bound(self, bound: StepBound) -> None:
        self.bounds.append(bound)


def pace_of(clock: Clock, *, competing: bool) -> tuple[StepPace, StepsInFlight, Asked]:
    """A pace that was told of steps of 20 ms, none of which the executor waited for."""
    in_flight, asked = StepsInFlight(lambda: clock.now), Asked(competing)
    pace = StepPace(2, 64, in_flight)
    for _ in range(100):
        pace.learn(cast("Scheduler", asked), STEP, StepResult(1, [], [], {}, 4, 20_000, 0))
    return pace, in_flight, asked


def test_for_one_tenant_steps_are_planned_ahead_as_far_as_they_may_be() -> None:
    pace, in_flight, asked = pace_of(Clock(), competing=False)
    scheduler = cast("Scheduler", asked)
    assert pace.wait_s(scheduler) == 0
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == 0
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == math.inf
    assert not asked.bounds


def test_behind_a_long_prompt_the_next_step_is_planned_towards_the_end() -> None:
    clock = Clock()
    pace, in_flight, asked = pace_of(clock, competing=False)
    scheduler, prompt = cast("Scheduler", asked), StepPlan(num_decodes=2, num_tokens=2 + 100)
    in_flight.add(prompt)
    assert pace.wait_s(scheduler) == 0  # nothing is known
    pace.learn(scheduler, prompt, StepResult(1, [], [], {}, 102, 50_000, 0))
    assert pace.wait_s(scheduler) == pytest.approx(0.75 * 0.050)
    clock.now += 0.030
    assert pace.wait_s(scheduler) == pytest.approx(0.0075)
    clock.now += 0.008
    assert pace.wait_s(scheduler) == 0
    # A faster one counts at once, a slower one by and by.
    in_flight.pop()
    in_flight.add(prompt)
    pace.learn(scheduler, prompt, StepResult(1, [], [], {}, 102, 20_000, 0))
    assert pace.wait_s(scheduler) == pytest.approx(0.75 * 0.020)
    pace.learn(scheduler, prompt, StepResult(1, [], [], {}, 102, 100_000, 0))
    assert pace.wait_s(scheduler) == pytest.approx(0.75 * 0.030)
    in_flight.pop()
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == 0
    in_flight.begin_epoch(1000)
    pace.begin_epoch(64)
    in_flight.add(prompt)
    assert pace.wait_s(scheduler) == 0


def test_while_tenants_compete_a_step_is_planned_when_the_one_that_runs_is_about_to_end() -> None:
    clock = Clock()
    pace, in_flight, asked = pace_of(clock, competing=True)
    scheduler = cast("Scheduler", asked)
    assert pace.wait_s(scheduler) == 0
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == pytest.approx(0.020, rel=0.05)
    clock.now += 0.015
    assert pace.wait_s(scheduler) == pytest.approx(0.005, rel=0.2)
    clock.now += 0.006
    assert pace.wait_s(scheduler) == 0
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == math.inf
    # The turn of the second has just come.
    in_flight.pop()
    assert pace.wait_s(scheduler) == pytest.approx(0.020, rel=0.05)
    assert asked.bounds


def test_the_times_of_an_executor_are_not_those_of_the_next_one() -> None:
    pace, in_flight, asked = pace_of(Clock(), competing=True)
    scheduler = cast("Scheduler", asked)
    in_flight.begin_epoch(1000)
    pace.begin_epoch(64)
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) == 0
    pace.learn(scheduler, STEP, StepResult(1, [], [], {}, 4, 1000, 0))
    in_flight.pop()
    in_flight.add(STEP)
    assert pace.wait_s(scheduler) < 0.001


def seen(costs_us: tuple[float, float, float], flooders: int, *, together: bool = False) -> Seen:
    return FloodedEngine(costs_us, flooders, together=together).run(settle_s=4, seconds=12)


# A small model on a CPU, on two machines; and a large one on a GPU, on paper. The second machine is quicker and
# takes twice as many steps.
@pytest.mark.parametrize(
    "costs_us",
    [(3600, 300, 120), pytest.param((1300, 170, 48), marks=pytest.mark.nightly), (10_000, 20, 60)],
    ids=["slow-cpu", "fast-cpu", "gpu"],
)
def test_a_quiet_tenant_beside_floods_in_virtual_time(costs_us: tuple[float, float, float]) -> None:
    alone = seen(costs_us, 0)
    # Each flooder a tenant, or one tenant that has them all.
    for flooders, bar, together in ((4, 2.0, False), (32, 2.5, False), (4, 2.0, True), (32, 2.5, True)):
        beside = seen(costs_us, flooders, together=together)
        assert len(beside.first_ms) >= 10
        assert statistics.median(beside.first_ms) <= bar * statistics.median(alone.first_ms)
        assert beside.cached_tokens / beside.prompt_tokens >= 0.9 * alone.cached_tokens / alone.prompt_tokens
