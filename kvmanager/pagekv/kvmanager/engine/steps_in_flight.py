"""Steps in flight, oldest first, and which of them a result answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from pagekv.kvmanager.engine.answer_check import AnswerCheck
from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


class StepsInFlight:
    """The steps of one epoch. The executor works on the oldest; the others wait for their turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plans: deque[StepPlan] = deque()
        # Number of the oldest step, counted from 1 within an epoch.
        self._step = 1
        # When the turn of the oldest step came; when its waiting time was last counted; and the seconds counted so far.
        self._turn = self._since = self._waited = 0.0
        self._check = AnswerCheck(0)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest(self) -> StepPlan | None:
        """The step whose answer is due; None when nothing is in flight."""
        return self._plans[0] if self._plans else None

    def entering_later(self) -> set[Seq]:
        """The sequences that enter the executor with a step behind the oldest. One of them may have the id of a
        sequence of the oldest step that has ended since.
        """
        return {new.sequence for plan in islice(self._plans, 1, None) for new in plan.new}

    def add(self, plan: StepPlan) -> None:
        """Adds a step that is about to be sent."""
        if not self._plans:
            self._begin_turn()
        self._plans.append(plan)

    def answered(self, result: StepResult) -> tuple[StepPlan, StepResult]:
        """The plan answered, which stays the oldest until `pop`, and the checked result. Raises WrongAnswer."""
        if not self._plans or result.step != self._step:
            due = f"must be {self._step}, with {len(self._plans)} in flight, got {result.step}"
            raise WrongAnswer("step", due)
        plan = self._plans[0]
        return plan, self._check.check(plan, result)

    def pop(self) -> None:
        """Removes the oldest step, whose result is committed; the turn of the next one begins."""
        self._plans.popleft()
        self._step += 1
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn = self._since = self._clock()
        self._waited = 0.0

    @property
    def turn_s(self) -> float:
        """Seconds since the turn of the oldest step came."""
        return self._clock() - self._turn

    def count_wait(self, at_most_s: float) -> float:
        """Seconds of the oldest step's turn during which this process ran; 0 if nothing is in flight. Must be called
        every `at_most_s` seconds: if more time passes between two calls, because the process was stopped or the machine
        asleep, only `at_most_s` is counted.
        """
        if not self._plans:
            return 0.0
        now = self._clock()
        self._waited += min(now - self._since, at_most_s)
        self._since = now
        return self._waited

    def begin_epoch(self, vocab_size: int) -> None:
        """Discards the steps: they will never be answered. Step numbers begin anew."""
        self._plans.clear()
        self._step = 1
        self._check = AnswerCheck(vocab_size)
