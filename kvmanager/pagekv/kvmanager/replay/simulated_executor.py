"""The executor of timed mode: computes nothing, but says how long each step would take."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.replay.options import StepCost
from pagekv.kvmanager.replay.trace import output_tokens
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class BegunStep:
    """The work of a step, known completely when the step is planned."""

    plan: StepPlan
    # Requests of the sequences in plan.sampling, by position.
    requests: NDArray[np.int64]
    seconds: float
    # Slots in block tables that no known token needs, at the ends of last blocks.
    unused_slots: int


class SimulatedExecutor:
    """Counts the tokens of sequences. Learns everything from step plans, as a real executor does. Call `begin` for
    steps in the order in which they are planned, and `finish` in the order in which they complete.
    """

    def __init__(self, cost: StepCost, block_size: int, arrivals: array[float]) -> None:
        """`arrivals[i]`: the time at which request i arrives, in seconds."""
        self.ttft_s = array("d")
        # The request of each time in `ttft_s`.
        self.ttft_requests = array("q")
        self.inter_token_s = array("d")
        self.generated_tokens = 0
        self.steps = 0
        self._cost = cost
        self._block_size = block_size
        # By request: the time of its latest token, in seconds; before the first token, its arrival.
        self._last_token_s = np.array(arrivals)
        self._has_token = np.zeros(len(arrivals), np.bool_)
        # By seq_id: request, computed tokens, known tokens, slots; all 0 if there is no sequence.
        self._columns = np.zeros((4, 64), np.int64)

    def begin(self, plan: StepPlan) -> BegunStep:
        self._columns[:, plan.finished] = 0
        for new in plan.new:
            if new.seq_id >= self._columns.shape[1]:
                self._columns = np.pad(self._columns, ((0, 0), (0, new.seq_id)))
            slots = len(new.block_ids) * self._block_size
            self._columns[:, new.seq_id] = new.sequence.request.arrival, new.computed_tokens, len(new.token_ids), slots
        request, computed, known, slots_of = self._columns
        for seq_id in plan.append_seq_ids:
            slots_of[seq_id] += self._block_size
        counts = np.minimum(known, 1)
        counts[plan.scheduled_seq_ids] = plan.scheduled_tokens
        decoding = (counts > 0) & (computed == known)
        computed += counts
        known += decoding
        self.steps += 1
        decodes = int(np.count_nonzero(decoding))
        seconds = self._cost.seconds(plan.num_tokens - decodes, decodes, int(computed[counts > 0].sum()))
        return BegunStep(plan, request[plan.sampling], seconds, int(slots_of.sum() - known.sum()))

    def finish(self, step: BegunStep, now_s: float) -> StepResult:
        requests = step.requests
        waited = now_s - self._last_token_s[requests]
        later = self._has_token[requests]
        self.inter_token_s.frombytes(waited[later].tobytes())
        self.ttft_s.frombytes(waited[~later].tobytes())
        self.ttft_requests.frombytes(requests[~later].tobytes())
        self._has_token[requests] = True
        self._last_token_s[requests] = now_s
        self.generated_tokens += len(requests)
        sampled, tokens = step.plan.sampling.tolist(), output_tokens(requests).tolist()
        return StepResult(self.steps, sampled, tokens, {}, step.plan.num_tokens, round(step.seconds * 1e6), 0)
