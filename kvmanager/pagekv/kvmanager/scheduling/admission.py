"""Who comes in: forks, admissions from the waiting queue, and the sequences of a request that return together.

Sequences of one request that were preempted, or beams of one search, come back together. What they shared they share
again: leading full blocks that the first of them brings back or computes, which the others hold meanwhile. Sequences
that were never admitted, as after a refused fork, come one by one, and so do those that do not fit together: at once
where they never can, otherwise after `PATIENCE_STEPS` at the head of the queue, and from then on to the end of their
request. One by one they share all the same. Only beams, which decide together, wait for blocks as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from pagekv.kvmanager.scheduling.block_tables import Arrival
from pagekv.kvmanager.scheduling.running_queue import RunningQueue, key
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_SEQ_ID, LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepPlan

# Steps after which a head of the queue that did not fit looks for newly cached blocks, even if none became free.
RETRY_STEPS = 16
# Steps, of a request in all, for which the head of the queue waits until what was preempted with it fits too; meanwhile
# nobody behind it is admitted.
PATIENCE_STEPS = 16


@dataclass(slots=True)
class _Blocked:
    """The head of the queue did not fit: it is not looked at again until enough blocks are free, or some steps later,
    for others may have published what it needs.
    """

    sequence: Seq
    # How many sequences were to come in together.
    count: int
    # Beside the watermark, which is another one when others have left.
    free_needed: int
    steps_left: int


class Admission:
    """Plans entries into the running order; `running` is that of the present epoch."""

    def __init__(self, running: RunningQueue, on_admission: Callable[[Seq], None]) -> None:
        """`on_admission` is called with every sequence that gets its blocks for the first time, before it publishes."""
        self._running = running
        self._on_admission = on_admission
        # Requests whose sequence 0 runs and others wait for its prompt.
        self.forking: list[LiveRequest] = []
        self._blocked: _Blocked | None = None

    def new_epoch(self, running: RunningQueue) -> None:
        """What waits for a fork goes on waiting for it."""
        self._running = running
        self._blocked = None

    def forget(self, request: LiveRequest) -> None:
        """The request has ended."""
        if request in self.forking:
            self.forking.remove(request)

    # -- forks

    def plan_forks(self, plan: StepPlan, budget: int, sampling: list[int]) -> None:
        """Forks every request whose prompt has been computed by an earlier step. Where slots, budget or blocks do not
        suffice for all sequences of a request, they queue, and share the prompt's full blocks when they come in.
        """
        running = self._running
        for request in list(self.forking):
            parent = request.sequences[0]
            if parent.state is SeqStatus.RUNNING and not running.rows.decoding[parent.seq_id]:
                continue  # its prompt is under way
            self.forking.remove(request)
            children = [s for s in request.sequences if s.state is SeqStatus.FORKING]
            room = min(budget - plan.num_tokens, running.limits.max_running - len(running.order))
            fits = len(children) <= room and running.pool.num_free - len(children) >= running.watermark(request)
            if children and parent.state in HOLDING and fits and running.tables.fork(parent, children):
                running.num_forking -= len(children)
                for child in children:
                    child.cached_tokens = parent.cached_tokens
                    running.hold(child)
                    running.enter(plan, child, budget, sampling)
            else:
                running.queue(children)

    # -- admissions

    def plan_admissions(self, plan: StepPlan, budget: int, sampling: list[int]) -> None:
        """Admits what waits in order; the first that does not fit blocks those behind it (no starvation)."""
        running, waiting = self._running, self._running.waiting
        while (head := waiting.head()) is not None and plan.num_tokens < budget:
            arrivals = self._admit(head, plan)
            if not arrivals:
                return
            for arrival in arrivals:
                waiting.pop()
                running.hold(arrival.sequence)
            if len(arrivals) == 1 and running.followers.is_ready(head):
                running.enter(plan, head, budget, sampling)
            else:
                running.returning = sorted([*running.returning, *(a.sequence for a in arrivals)], key=key)
                self.plan_returns(plan, budget, sampling)
            if head.index == 0 and any(s.state is SeqStatus.FORKING for s in head.request.sequences):
                self.forking.append(head.request)

    def plan_returns(self, plan: StepPlan, budget: int, sampling: list[int]) -> None:
        """Enters those that hold blocks and are not at the executor, as far as budget and sequence slots go: beams that
        a decision has given their next token, and what was admitted together.
        """
        running = self._running
        for sequence in list(running.returning):
            # More beams may hold blocks than fit into the executor at once. Each leaves after a step, so the others
            # follow; and while there are as many nothing else is admitted, so what stays there leaves a slot.
            there = len(running.rows.decoding_rows()) + len(running.prefilling) + len(plan.beams)
            if plan.num_tokens >= budget or there >= running.limits.max_running:
                return
            if running.followers.is_ready(sequence):
                running.returning.remove(sequence)
                running.enter(plan, sequence, budget, sampling)

    def _admit(self, head: Seq, plan: StepPlan) -> list[Arrival]:
        """Takes blocks for the head of the queue and what comes in with it; none, and nothing taken, when there is no
        room.
        """
        group = self._unit(head)
        # A preempted sequence is recomputed from its tokens, so those still promised must arrive first.
        if any(sequence.seq_id != NO_SEQ_ID for sequence in group):
            return []
        arrivals = self._admit_together(group, plan)
        if not arrivals and len(group) > 1 and self._come_apart(group):
            arrivals = self._admit_together([head], plan)
        for arrival in arrivals:
            self._note(arrival)
        return arrivals

    def _come_apart(self, group: list[Seq]) -> bool:
        """Whether sequences that did not fit together have waited for it long enough."""
        running, request = self._running, group[0].request
        request.steps_at_head += 1
        if request.search is None:
            never = len(group) > running.limits.max_running or not running.order
            request.apart = never or request.steps_at_head >= PATIENCE_STEPS
            return request.apart
        # Beams that an empty pool cannot hold.
        return not running.order

    def _admit_together(self, group: list[Seq], plan: StepPlan) -> list[Arrival]:
        """Takes blocks for all of these; none, and nothing taken, when they would not leave the watermark, or there
        are not so many slots.
        """
        running, head = self._running, group[0]
        request = head.request
        # Beams leave the executor after every step, so they can take turns in one slot.
        slots = len(group) if request.search is None else 1
        if len(running.order) + slots > running.limits.max_running:
            return []
        watermark, blocked = running.watermark(request), self._blocked
        if blocked is not None and blocked.sequence is head and blocked.count == len(group):
            blocked.steps_left -= 1
            # With nothing planned there may be no later step to look again in.
            if plan.num_tokens and blocked.steps_left and running.pool.num_free < blocked.free_needed + watermark:
                return []
        self._blocked = None
        arrivals = self._arrivals(group)
        missing = running.tables.admit(arrivals, watermark)
        if missing:
            self._blocked = _Blocked(head, len(group), running.pool.num_free + missing - watermark, RETRY_STEPS)
            return []
        return arrivals

    def _unit(self, head: Seq) -> list[Seq]:
        """The waiting sequences of the head's request that have been admitted before; only the head where it has not,
        or where they come one by one.
        """
        running, request = self._running, head.request
        if len(request.sequences) == 1 or request.apart or (running.order and running.is_alone(request)):
            return [head]
        waiting = sorted((s for s in request.sequences if s.state is SeqStatus.WAITING), key=key)
        return list(takewhile(lambda s: s.cached_tokens is not None, waiting)) or [head]

    def _arrivals(self, group: list[Seq]) -> list[Arrival]:
        """With whom each of them shares its leading blocks."""
        request = group[0].request
        if len(request.sequences) == 1 or not self._running.limits.fork_sharing:
            return [Arrival(sequence) for sequence in group]
        size = self._running.pool.block_size
        holders = sorted((s for s in request.sequences if s.state in HOLDING), key=key)
        arrivals = []
        for sequence in group:
            arrival = Arrival(sequence)
            if holders and request.search is None:
                # The last prompt position is computed by each for itself.
                arrival = Arrival(sequence, holders[0], (len(request.command.prompt_ids) - 1) // size)
            else:
                # Beams share what they had in common before they parted.
                for holder in holders:
                    shared = _common_tokens(sequence, holder) // size
                    if shared > arrival.shared:
                        arrival = Arrival(sequence, holder, shared)
            arrivals.append(arrival)
            holders.append(sequence)
        return arrivals

    def _note(self, arrival: Arrival) -> None:
        """After an admission: who waits for whom, and what a first one found."""
        running, sequence, sibling = self._running, arrival.sequence, arrival.sibling
        if sibling is not None and arrival.shared:
            running.followers.follow(sequence, sibling, arrival.shared * running.pool.block_size)
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sibling.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            running.counters.prompt_tokens += sequence.num_prompt
            running.counters.cached_tokens += sequence.cached_tokens
            self._on_admission(sequence)


def _common_tokens(one: Seq, other: Seq) -> int:
    """Leading tokens that two sequences share, without the last, which each computes for itself."""
    length = min(len(one.token_ids), len(other.token_ids)) - 1
    differs = np.array(one.token_ids[:length], np.uint32) != np.array(other.token_ids[:length], np.uint32)
    return int(differs.argmax()) if differs.any() else length
