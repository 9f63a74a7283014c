"""The choice of the sequences that decode in a bounded step. The others are passed over, and decode in a later step.

Decodes may use the whole step; half of it if a prompt may come, too; a sixteenth if that prompt is a newcomer's
(`VirtualTokens.greet`), and then at most half of the sequences decode. Tenants share this room by weight.

A sequence that was passed over in PATIENCE consecutive steps goes before all others. So with n decoding sequences and
room for m of them, none is passed over in more than PATIENCE + n / m consecutive steps, rounded up.
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
    """Chooses the decodes of bounded steps. Used by the scheduler alone."""

    _batch: DecodeBatch
    _admission: Admission
    _served: VirtualTokens

    def newcomer(self) -> int | None:
        """The tenant of the step's first prompt, if it is a newcomer."""
        prompt = self._admission.next_prompt()
        return None if prompt is None or prompt.tenant not in self._served.newcomers else prompt.tenant

    def passed_over(self, rows: Rows, bound: StepBound, *, newcomer: bool) -> Rows:
        """The rows that are passed over in this step, ascending. To be called once per step."""
        batch = self._batch
        prompts = self._admission.next_prompt() is not None
        count = bound.num_decodes(BESIDE_NEWCOMER if newcomer else BESIDE_PROMPT if prompts else 1)
        if newcomer:
            # Also if decodes seem to cost nothing: if all steps had equally many, their cost could never be learnt.
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
    """Positions of sequences, next to decode first: the first of each tenant, then the second of each, and so on, by
    weight. A tenant's first ones are those passed over longest. `weights` are by tenant.
    """
    by_tenant = np.lexsort((-passed, tenants))
    whose = tenants[by_tenant]
    begins = np.flatnonzero(np.diff(whose, prepend=-1))
    nth = np.arange(len(whose)) - np.repeat(begins, np.diff(begins, append=len(whose)))
    level = np.empty(len(whose))
    level[by_tenant] = (nth + 1) / weights[whose]
    level[passed >= PATIENCE] = 0
    return np.lexsort((-passed, level))
