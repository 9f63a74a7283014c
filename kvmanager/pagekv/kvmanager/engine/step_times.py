"""Times of steps, learnt from the executor's reports, and the bound of steps while tenants compete."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.step_plan import StepPlan

# A bounded step takes at most so many times its base, the cost that every step has. With a lower bound a newcomer is
# served sooner; with a higher one a smaller share of all time goes into bases.
MOST_BASES = 4
# The same while there are visitors, which mostly come when a step has just begun.
VISITED_BASES = 2.5
# No bound is shorter than this, in microseconds: nobody notices a shorter wait.
LEAST_US = 10_000.0
# A step may have at least 1 / MIN_PARTS of the token budget, whatever was learnt.
MIN_PARTS = 32
# The factor by which the weight of a step falls with the next one; and the weight of the assumption that all cost is
# the base's, relative to the latest steps.
FORGETTING, KEEPING = 0.99, 1e-3
# The executor may be idle before a step for 1 / IDLE_PARTS of the step's time.
IDLE_PARTS = 50
# A step longer than HELD_UP times the expected time counts for less, unless CHANGED recent steps were as long.
HELD_UP, CHANGED = 1.5, 2.0
# Units of base, decodes and prompt tokens that take about equally long, so that each of the three costs is learnt.
_SCALE = np.array([1.0, 16.0, 64.0])
_BY_SCALE: NDArray[np.float64] = 1.0 / _SCALE
_IS_BASE = np.array([1.0, 0.0, 0.0])


class StepTimes:
    """The time of a step is modelled as a sum: the base, and a cost for each decode and each prompt token. The three
    costs are fitted to the latest steps by least squares of the relative errors.

    The lengths of contexts are ignored: their average cost is part of the three costs.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_tokens = max_batch_tokens
        # Costs in microseconds, in units of _SCALE, and the sums from which they are solved.
        self._weights = np.zeros(3)
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        # Recent steps that seemed to be held up: every other step reduces the count by a quarter.
        self._held_up = 0.0
        # Microseconds before the end of a step at which the next one is planned.
        self.lead_us = 1000.0

    def learn(self, plan: StepPlan, execute_us: int) -> None:
        """Learns from the time that the executor took for a step. A step that computed nothing is ignored."""
        if not plan.num_tokens:
            return
        made_of = _made_of(plan)
        guess = float(self._weights @ made_of)
        held_up = 0 < HELD_UP * guess < execute_us
        self._held_up = self._held_up + 1 if held_up else max(0.0, self._held_up - 0.25)
        time = float(max(execute_us, 1))
        if self._held_up >= CHANGED:
            # Costs have changed: earlier steps count for less with each such step.
            self._squares, self._products = self._squares / 2, self._products / 2
        elif guess:
            time = min(max(time, guess / 2), HELD_UP * guess)
        relative = made_of / time
        self._squares = FORGETTING * self._squares + np.outer(relative, relative)
        self._products = FORGETTING * self._products + relative
        # Costs that the latest steps do not tell apart are taken for the base: then steps grow until they do tell them
        # apart. Taken for costs of decodes and prompts, they would make steps smaller, and all alike for ever.
        stays = KEEPING * np.trace(self._squares)
        known = self._products + stays * self._weights * _IS_BASE
        self._weights = _not_negative(self._squares + stays * np.eye(3), known)

    def learn_idle(self, plan: StepPlan, idle_us: int) -> None:
        """Learns how late a step may be planned, from the executor's idle time before a step planned just in time."""
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
        # Not 0, even if prompts seem to cost nothing.
        prompt = max(prompt, most / self._max_tokens, 1e-3)

        def tokens(most_us: float) -> int:
            wanted = max(self._max_tokens // MIN_PARTS, int(_rounded(most_us / prompt)), 1)
            return min(wanted, self._max_tokens)

        visited = max(VISITED_BASES * base, LEAST_US) - base
        return StepBound(tokens(most), _rounded(decode / prompt), tokens(visited))


def _not_negative(squares: NDArray[np.float64], products: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least-squares solution without negative costs: the most negative cost becomes 0 and the others are solved
    again, until none is negative. In some of a thousand cases the result is a little worse than the best one. Only
    setting negative costs to 0 would be no solution: a base that is too large, balanced by decodes of negative cost,
    would stay. `products` are never negative, so the last cost left is not negative either.
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
