"""When the next step is planned: at once, or while tenants compete just in time."""

from __future__ import annotations

import math

from pagekv.kvmanager.engine.step_times import StepTimes
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


class StepPace:
    """Used by the engine loop alone. Steps are planned ahead as far as they may be, so the executor need not wait.

    While tenants compete that would make a newcomer wait for the rest of one step and the whole of another. So the next
    step is planned shortly before the one that runs ends, and steps have a bound.
    """

    def __init__(self, depth: int, max_batch_tokens: int, in_flight: StepsInFlight) -> None:
        """At most `depth` steps are in flight."""
        self._depth = depth
        self._in_flight = in_flight
        self._times = StepTimes(max_batch_tokens)

    def begin_epoch(self, max_batch_tokens: int) -> None:
        """Forgets the times of the executor before: this one may be another, and from nothing they are learnt in a
        dozen steps, from wrong ones in a hundred.
        """
        self._times = StepTimes(max_batch_tokens)

    def wait_s(self, scheduler: Scheduler) -> float:
        """Seconds until the next step is to be planned: 0 for now, infinite for not before a result."""
        running = self._in_flight.oldest
        if len(self._in_flight) >= self._depth:
            return math.inf
        if running is None or not scheduler.competing:
            return 0.0
        from_begin_s = 1e-6 * (self._times.expected_us(running) - self._times.lead_us)
        return max(0.0, from_begin_s - self._in_flight.turn_s)

    def learn(self, scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
        """Learns from the times of a step, while tenants compete, and bounds the steps to come."""
        if scheduler.competing:
            self._times.learn(plan, result.execute_us)
            self._times.learn_idle(plan, result.idle_us)
            scheduler.set_bound(self._times.bound())
