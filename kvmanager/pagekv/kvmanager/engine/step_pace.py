"""When the next step is planned: at once; a little later behind long prompts; just in time while tenants compete."""

from __future__ import annotations

import math

from pagekv.kvmanager.engine.step_times import StepTimes
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult

# A step with so many prompt tokens takes long enough for more requests to come.
LONG_PROMPT = 64
# During this share of such a step's time no other step is planned.
HELD = 0.75
# A slower step raises the expected time per token by this share of the difference; a faster step lowers it at once.
SLOWER = 0.125


class StepPace:
    """Used by the engine loop alone. Steps are planned ahead as far as allowed, so that the executor need not wait.

    Behind a step that computes long prompts, the next step is planned when three quarters of that step's time are over.
    So requests that come meanwhile enter the next step together: they do not wait for one step more, nor for a small
    step that only some of them would share.

    While tenants compete, that would make a newcomer wait for the rest of one step and the whole of another. So the
    next step is planned shortly before the running one ends, and steps have a bound.
    """

    def __init__(self, depth: int, max_batch_tokens: int, in_flight: StepsInFlight) -> None:
        """At most `depth` steps are in flight."""
        self._depth = depth
        self._in_flight = in_flight
        self._times = StepTimes(max_batch_tokens)
        # Expected microseconds for a prompt token.
        self._prompt_us = 0.0

    def begin_epoch(self, max_batch_tokens: int) -> None:
        """Forgets the times of the executor before, because wrong times are corrected only slowly."""
        self._times = StepTimes(max_batch_tokens)
        self._prompt_us = 0.0

    def wait_s(self, scheduler: Scheduler) -> float:
        """Seconds until the next step is to be planned: 0 for now, infinite for not before a result."""
        running = self._in_flight.oldest
        if len(self._in_flight) >= self._depth:
            return math.inf
        if running is None:
            return 0.0
        if scheduler.competing:
            held_us = self._times.expected_us(running) - self._times.lead_us
        elif tokens := _long_prompt(running):
            held_us = HELD * self._prompt_us * tokens
        else:
            return 0.0
        return max(0.0, 1e-6 * held_us - self._in_flight.turn_s)

    def learn(self, scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
        """Learns from the times of a step and, while tenants compete, bounds the steps to come."""
        if tokens := _long_prompt(plan):
            us, before = result.execute_us / tokens, self._prompt_us
            self._prompt_us = min(us, before + SLOWER * (us - before)) if before else us
        if scheduler.competing:
            self._times.learn(plan, result.execute_us)
            self._times.learn_idle(plan, result.idle_us)
            scheduler.set_bound(self._times.bound())


def _long_prompt(plan: StepPlan) -> int:
    """Prompt tokens in a step; 0 if they are few."""
    tokens = plan.num_tokens - plan.num_decodes
    return tokens if tokens >= LONG_PROMPT else 0
