"""Times of steps, learnt from the executor's reports, and the bound of steps while tenants compete."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.step_plan import StepPlan

# A bounded step takes so many times what every step costs: with fewer a newcomer is served sooner, with more a smaller
# part of all time goes into that. Less than these microseconds is no wait that anybody notices.
MOST_BASES = 4
# The same while there are visitors, which mostly come when a step has just begun.
VISITED_BASES = 2.5
LEAST_US = 10_000.0
# At least one part of the token budget is a step's, whatever was learnt.
MIN_PARTS = 32
# The weight of a step by the next one; and that of what is assumed, by what the latest steps say.
FORGETTING, KEEPING = 0.99, 1e-3
# For one part of a step the executor may stand still before it.
IDLE_PARTS = 50
# A step that takes so many times what was expected was held up, and counts for less; unless so many do.
HELD_UP, CHANGED = 1.5, 2.0
# Decodes and tokens of prompts that take about as long as what every step costs, so that each of the three is learnt.
_SCALE = np.array([1.0, 16.0, 64.0])
_BY_SCALE: NDArray[np.float64] = 1.0 / _SCALE
_IS_BASE = np.array([1.0, 0.0, 0.0])


class StepTimes:
    """A step's time is taken for a sum: the base, and so much for each decode and each token of a prompt. The three are
    those that explain the latest steps with the least squares of relative errors.

    Contexts are not looked at: what they cost is in the three, on average.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_tokens = max_batch_tokens
        # Microseconds for each of _SCALE, and the sums that they are solved from.
        self._weights = np.zeros(3)
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        # Steps of late that seemed to be held up: each of the others takes a quarter of one away.
        self._held_up = 0.0
        # Microseconds before the end of a step at which the next one is planned.
        self.lead_us = 1000.0

    def learn(self, plan: StepPlan, execute_us: int) -> None:
        """The executor took so long for this step. One that computed nothing tells nothing."""
        if not plan.num_tokens:
            return
        made_of = _made_of(plan)
        guess = float(self._weights @ made_of)
        held_up = 0 < HELD_UP * guess < execute_us
        self._held_up = self._held_up + 1 if held_up else max(0.0, self._held_up - 0.25)
        time = float(max(execute_us, 1))
        if self._held_up >= CHANGED:
            # Costs have changed: what was learnt counts for less with each such step.
            self._squares, self._products = self._squares / 2, self._products / 2
        elif guess:
            time = min(max(time, guess / 2), HELD_UP * guess)
        relative = made_of / time
        self._squares = FORGETTING * self._squares + np.outer(relative, relative)
        self._products = FORGETTING * self._products + relative
        # Costs that the latest steps do not tell apart are the base's: then steps grow until they do. Taken for costs
        # of what steps compute, the same would make them smaller, and alike for ever.
        stays = KEEPING * np.trace(self._squares)
        known = self._products + stays * self._weights * _IS_BASE
        self._weights = _not_negative(self._squares + stays * np.eye(3), known)

    def learn_idle(self, plan: StepPlan, idle_us: int) -> None:
        """The executor stood still for so long before this step, which was planned as late as it could be."""
        expected = self.expected_us(plan)
        allowed = expected / IDLE_PARTS
        wanted = self.lead_us + (min(idle_us, 5 * allowed) - allowed) / 4
        self.lead_us = min(max(wanted, 0.0), expected)

    def expected_us(self, plan: StepPlan) -> float:
        return float(self._weights @ _made_of(plan))

    def bound(self) -> StepBound:
        """The bound of steps by what was learnt so far, rounded so that it seldom changes."""
        base, decode, prompt = (self._weights / _SCALE).tolist()
        most = max(MOST_BASES * base, LEAST_US) - base
        # Also where prompts cost nothing that could be noticed.
        prompt = max(prompt, most / self._max_tokens, 1e-3)

        def tokens(most_us: float) -> int:
            wanted = max(self._max_tokens // MIN_PARTS, int(_rounded(most_us / prompt)), 1)
            return min(wanted, self._max_tokens)

        visited = max(VISITED_BASES * base, LEAST_US) - base
        return StepBound(tokens(most), _rounded(decode / prompt), tokens(visited))


def _not_negative(squares: NDArray[np.float64], products: NDArray[np.float64]) -> NDArray[np.float64]:
    """The solution of least squares without the costs that would be negative, the most negative one left out first: in
    some of a thousand cases that leaves a little more than the least. To make those 0 alone is no solution: a base that
    is too large would keep itself, with decodes that give time back. `products` are never negative, so neither is the
    last cost.
    """
    free = np.arange(len(products))
    while True:
        found = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        if found.min() >= 0:
            weights = np.zeros(len(products))
            weights[free] = found
            return weights
        free = np.delete(free, found.argmin())


def _made_of(plan: StepPlan) -> NDArray[np.float64]:
    counts: NDArray[np.float64] = np.array([1.0, plan.num_decodes, plan.num_tokens - plan.num_decodes])
    return counts * _BY_SCALE


def _rounded(number: float) -> float:
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(16 * mantissa), exponent - 4)
