"""An executor that only keeps count: learns everything from step plans, as a real one does, and answers by a clock.

Every sequence computes one token a step unless the plan lists it with another number, so sums over all sequences are
updated by the changes in a plan, and a step costs no work per running sequence but for its sampled token.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.replay.cost_model import StepCost
from pagekv.kvmanager.replay.synthetic_prompt import output_tokens
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


@dataclass(slots=True)
class _Held:
    """A sequence at the executor. computed = offset + steps begun."""

    offset: int
    slots: int
    # Known tokens when the sequence came; more once it decodes.
    tokens: int


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step's work, all of it known when the step is planned."""

    plan: StepPlan
    # Requests of the sequences in plan.sampling, by position.
    requests: NDArray[np.intp]
    seconds: float
    # Slots in block tables that no known token needs: the unused ends of last blocks.
    unused_slots: int


class SimulatedExecutor:
    """`begin` steps in order as they are planned, `finish` them in order as they complete."""

    def __init__(self, cost: StepCost, block_size: int, arrivals: array[float]) -> None:
        """`arrivals[i]` is when request i arrives, in seconds."""
        self.ttft_s = array("d")
        self.inter_token_s = array("d")
        self.generated_tokens = 0
        self.steps = 0
        self.scheduled_tokens = 0
        # First admission of each request: full blocks, and tokens, that were hits.
        self.hit_blocks = 0
        self.hit_tokens = 0
        self._cost = cost
        self._block_size = block_size
        self._arrivals = arrivals
        # By request: seconds, the latest token; before the first one, the arrival.
        self._last_token_s = np.array(arrivals)
        self._has_token = np.zeros(len(arrivals), np.bool_)
        # By seq_id: the index of the request.
        self._request = np.zeros(64, np.intp)
        self._admitted = bytearray(len(arrivals))
        self._held: dict[int, _Held] = {}
        # Seq_ids that have sampled: past their known tokens, so each computes one more position a step.
        self._decoding: set[int] = set()
        # Sums over _held of computed positions, slots and tokens; a decoding sequence's tokens are its computed ones.
        self._computed = 0
        self._slots = 0
        self._tokens = 0
        self._decisions = hashlib.sha256()

    def begin(self, plan: StepPlan) -> BegunStep:
        """Takes in a plan; to be called right after `schedule`, while the pool is as this step leaves it."""
        self._digest(plan)
        for seq_id in plan.finished:
            held = self._held.pop(seq_id)
            computed = held.offset + self.steps
            self._computed -= computed
            self._slots -= held.slots
            self._tokens -= max(held.tokens, computed)
            self._decoding.discard(seq_id)
        for new in plan.new:
            slots = len(new.block_ids) * self._block_size
            self._held[new.seq_id] = _Held(new.computed_tokens - self.steps, slots, len(new.token_ids))
            self._computed += new.computed_tokens
            self._slots += slots
            self._tokens += len(new.token_ids)
            index = new.sequence.request.arrival
            if new.seq_id >= len(self._request):
                self._request = np.resize(self._request, 2 * new.seq_id)
            self._request[new.seq_id] = index
            if not self._admitted[index]:
                self._admitted[index] = 1
                self.hit_blocks += new.computed_tokens // self._block_size
                self.hit_tokens += new.computed_tokens
        for seq_id in plan.append_seq_ids:
            self._held[seq_id].slots += self._block_size
        self._slots += len(plan.append_seq_ids) * self._block_size
        decodes, idle_kv = len(self._decoding), 0
        for seq_id, count in zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True):
            held = self._held[seq_id]
            if count == 0:
                idle_kv += held.offset + self.steps
            if seq_id in self._decoding:
                decodes -= 1
            held.offset += count - 1
        self._decoding.update(plan.sampling.tolist())
        self._computed += plan.num_tokens
        self._tokens += decodes
        self.steps += 1
        self.scheduled_tokens += plan.num_tokens
        seconds = self._cost.seconds(plan.num_tokens - decodes, decodes, self._computed - idle_kv)
        return BegunStep(plan, self._request[plan.sampling], seconds, self._slots - self._tokens)

    def finish(self, step: BegunStep, now_s: float) -> StepResult:
        """The result of a begun step that completes at `now_s`."""
        seq_ids = step.plan.sampling
        requests = step.requests
        waited = now_s - self._last_token_s[requests]
        later = self._has_token[requests]
        self.inter_token_s.frombytes(waited[later].tobytes())
        self.ttft_s.frombytes(waited[~later].tobytes())
        self._has_token[requests] = True
        self._last_token_s[requests] = now_s
        self.generated_tokens += len(seq_ids)
        tokens = output_tokens(requests)
        computed, microseconds = step.plan.num_tokens, round(step.seconds * 1e6)
        return StepResult(self.steps, seq_ids.tolist(), tokens.tolist(), {}, computed, microseconds, 0)

    def decisions(self) -> str:
        """SHA-256, in hexadecimal, over every plan so far: equal replays made equal decisions."""
        return self._decisions.hexdigest()

    def _digest(self, plan: StepPlan) -> None:
        columns = [plan.finished, plan.append_seq_ids, plan.append_blocks]
        columns += [plan.scheduled_seq_ids, plan.scheduled_tokens, plan.sampling.tolist()]
        columns += [[new.seq_id, new.computed_tokens, *new.block_ids] for new in plan.new]
        for column in columns:
            # Lengths before values, so that no two plans give the same bytes.
            self._decisions.update(array("q", [len(column), *column]).tobytes())
