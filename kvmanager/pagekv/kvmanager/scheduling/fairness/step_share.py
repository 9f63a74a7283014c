"""The sequences that decode in a step that has a bound; others are passed over, and keep their turn for a later one.

Decodes have the whole step, half of it where a prompt may come too, and a sixteenth where that prompt is a newcomer's
(`VirtualTokens.greet`), half of them at most. Tenants have it by weight.

A sequence that was passed over in PATIENCE steps running goes before all others. So with n that decode, of which m have
room, none is passed over in more than PATIENCE + n / m steps running, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.scheduling.admission import Admission
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch, Rows
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.virtual_tokens import VirtualTokens

PATIENCE = 8
BESIDE_PROMPT, BESIDE_NEWCOMER = 2, 16


@dataclass(slots=True)
class StepShare:
    """Used by the scheduler alone."""

    _batch: DecodeBatch
    _admission: Admission
    _served: VirtualTokens

    def newcomer(self) -> int | None:
        """The tenant of the step's first prompt, if it is a newcomer."""
        prompt = self._admission.next_prompt()
        return None if prompt is None or prompt.tenant not in self._served.newcomers else prompt.tenant

    def passed_over(self, rows: Rows, bound: StepBound, *, newcomer: bool) -> Rows:
        """The rows among these that sit this step out, ascending; to be called once a step."""
        batch = self._batch
        prompts = self._admission.next_prompt() is not None
        count = bound.num_decodes(BESIDE_NEWCOMER if newcomer else BESIDE_PROMPT if prompts else 1)
        if newcomer:
            # Also where they seem to cost nothing: if all steps had as many, nothing else would ever be learnt.
            count = min(count, -(-len(rows) // 2))
        passed = rows[:0]
        if count < len(rows):
            order = _order(batch.tenants[rows], self._served.weights, batch.passed[rows])
            passed = np.sort(rows[order[count:]])
            batch.passed[passed] += 1
            rows = rows[order[:count]]
        batch.passed[rows] = 0
        return passed


def _order(tenants: NDArray[np.int32], weights: NDArray[np.float64], passed: NDArray[np.int32]) -> Rows:
    """Positions of sequences, next to decode first: the first of each tenant, then the second of each and so on, by
    weight; of one tenant those that were passed over longest. `weights` are by tenant.
    """
    by_tenant = np.lexsort((-passed, tenants))
    whose = tenants[by_tenant]
    begins = np.flatnonzero(np.diff(whose, prepend=-1))
    nth = np.arange(len(whose)) - np.repeat(begins, np.diff(begins, append=len(whose)))
    level = np.empty(len(whose))
    level[by_tenant] = (nth + 1) / weights[whose]
    level[passed >= PATIENCE] = 0
    return np.lexsort((-passed, level))
