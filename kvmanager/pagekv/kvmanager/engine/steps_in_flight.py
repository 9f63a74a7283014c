"""Steps in flight, oldest first; checks that results arrive in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


class StepsInFlight:
    """The steps of one epoch. The executor works on the oldest; the others wait for their turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plans: deque[StepPlan] = deque()
        # Number of the oldest step, counted from 1 within an epoch.
        self._step = 1
        # When the turn of the oldest step came.
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest(self) -> StepPlan | None:
        """The step whose answer is due; None when nothing is in flight."""
        return self._plans[0] if self._plans else None

    def add(self, plan: StepPlan) -> None:
        """Adds a step that is about to be sent."""
        if not self._plans:
            self._since = self._clock()
        self._plans.append(plan)

    def answered(self, result: StepResult) -> StepPlan:
        """The plan that `result` answers, which stays the oldest until `pop`. Raises InvariantError when there is no
        such plan.
        """
        if not self._plans or result.step != self._step:
            raise InvariantError(f"a result of step {result.step}, due is {self._step} of {len(self._plans)} in flight")
        plan = self._plans[0]
        if result.computed_tokens != plan.num_tokens:
            raise InvariantError(
                f"step {result.step} planned {plan.num_tokens} tokens, the executor computed {result.computed_tokens}"
            )
        return plan

    def pop(self) -> None:
        """Removes the oldest step, whose result is committed; the next one's turn comes."""
        self._plans.popleft()
        self._step += 1
        self._since = self._clock()

    def waited_s(self) -> float:
        """Seconds that the oldest step has had its turn; 0 when nothing is in flight."""
        return self._clock() - self._since if self._plans else 0.0

    def end_epoch(self) -> None:
        """Discards the steps: they will never be answered. Step numbers begin anew."""
        self._plans.clear()
        self._step = 1
