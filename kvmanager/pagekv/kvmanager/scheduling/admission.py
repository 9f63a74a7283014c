"""Admission into the running order: forks, the waiting queue, and sequences of a request that return together.

Preempted sequences of one request are admitted together and share again the blocks that they shared before, unless they
do not fit together. Beams wait for blocks as one large sequence does (DESIGN 5, "A preempted request returns whole if
it fits").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from pagekv.kvmanager.scheduling.block_tables import Arrival, BlockTables
from pagekv.kvmanager.scheduling.queues import RunningQueue, WaitingQueue
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_SEQ_ID, LiveRequest, Seq, SeqStatus, key
from pagekv.kvmanager.scheduling.shared_prefill import pair_arrivals
from pagekv.kvmanager.scheduling.step_builder import StepBuilder

# A head of the queue that did not fit is tried again after this many steps even if no block became free: other
# sequences may have published blocks that it hits.
RETRY_STEPS = 16
# Steps, over a request's whole life, for which its preempted sequences wait at the head of the queue until all of them
# fit together. Meanwhile nothing behind them is admitted.
PATIENCE_STEPS = 16


@dataclass(slots=True)
class _Blocked:
    """A head of the queue that did not fit: tried again when enough blocks are free, or after RETRY_STEPS steps."""

    sequence: Seq
    # Number of sequences that were to be admitted together.
    count: int
    # Blocks that must be free, without the watermark, which changes when other requests leave.
    free_needed: int
    steps_left: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Sequences at the head of the queue that did not fit together."""

    group: list[Seq]
    # Slots that they need, and blocks that must be free for them; 0 blocks: not counted, because slots were missing.
    slots: int
    free_blocks: int


@dataclass(slots=True)
class Admission:
    """Plans entries into the running order of one epoch."""

    _running: RunningQueue
    _tables: BlockTables
    _waiting: WaitingQueue
    _blocked: _Blocked | None = None
    # Whether this step admits from the waiting queue before sequences return: its head found too few bytes in the step
    # before, and sequences that return in every step could starve it. Never true in two consecutive steps, or a deep
    # queue could starve the returning sequences.
    goes_first: bool = False
    # Whether admission has ended for the step being planned, because a head of the queue did not fit.
    _ended: bool = False
    # The group at the head of the queue for which the latest step had too few blocks or slots.
    refused: Refused | None = None

    def next_prompt(self) -> Seq | None:
        """The sequence whose prompt the next step is expected to compute first, or None. It is of the tenant that was
        served least: a prefill under way, or the head of the queue unless that lacked blocks or slots in the latest
        step.
        """
        served, head = self._waiting.served, self._waiting.head()
        if self.refused is not None and self.refused.group[0] is head:
            head = None
        first = min(self._running.prefilling, key=lambda each: (served.place(each.tenant), each.key), default=None)
        if head is None or (first is not None and not served.goes_before(head.tenant, first.tenant)):
            return first
        return head

    def plan_forks(self, step: StepBuilder) -> None:
        """Forks every request whose prompt an earlier step has computed. If slots, token budget, bytes or blocks do not
        suffice for all sequences of a request, all of them join the waiting queue and share the prompt's full blocks at
        admission.
        """
        running, tables = self._running, self._tables
        for request in self._waiting.forking[:]:
            parent = request.sequences[0]
            if parent.state is SeqStatus.RUNNING and not running.batch.decoding[parent.seq_id]:
                continue  # its prompt is still being computed
            children = self._waiting.take_children(request)
            slots = tables.limits.max_running - len(running.order)
            blocks = tables.pool.num_free_for(request.tenant) - self._watermark(request)
            fits = len(children) <= min(step.room, slots, blocks) and step.takes(parent, len(children))
            may = children and parent.state in HOLDING and fits and tables.limits.fork_sharing
            # Each child computes the last prompt position itself.
            if may and tables.fork([parent] * len(children), children, recomputed=1):
                for child in children:
                    child.cached_tokens = parent.cached_tokens
                    running.add(child)
                    step.add_new(child)
            else:
                for child in children:
                    self._waiting.push(child)

    def plan_returns(self, step: StepBuilder) -> None:
        """Adds members of the running order that are not at the executor to the step, as far as token budget, bytes and
        slots allow: beams that got their next token from a decision, and sequences that were admitted together.
        """
        running = self._running
        # Beams return in every step, and leave half of the bytes to the head of the queue, if there is one.
        half = self._waiting.head() is not None
        for sequence in running.returning[:]:
            # More beams may hold blocks than the executor has slots. Each beam leaves after one step, so the others
            # follow. Nothing else is admitted meanwhile, so the sequences that stay at the executor leave a slot.
            if not step.room or step.num_at_executor >= self._tables.limits.max_running:
                return
            if running.shared_prefill.is_ready(sequence):
                if not step.takes(sequence, half=half):
                    return
                step.add_new(sequence)

    def plan_prefills(self, step: StepBuilder, under_way: list[Seq]) -> None:
        """Continues the prefills under way, then admits from the waiting queue in order. The first sequence that does
        not fit blocks those behind it, so none starves. With several tenants, prefills and admissions are merged in one
        order: the tenant that was served least comes first.
        """
        went_first, self.goes_first, self.refused = self.goes_first, False, None
        self._ended = False
        served = self._waiting.served
        self._waiting.hold_back(self._running.requests)
        if served.several:
            under_way = sorted(under_way, key=lambda sequence: (served.place(sequence.tenant), sequence.key))
        for sequence in under_way:
            if served.several:
                self._plan_admissions(step, went_first, sequence)
            step.add_chunk(sequence)
        self._plan_admissions(step, went_first)

    def _plan_admissions(self, step: StepBuilder, went_first: bool, before: Seq | None = None) -> None:
        """Admits heads of the queue; with `before`, a prefill under way, only those served no more than its tenant."""
        running, waiting = self._running, self._waiting
        while step.room and not self._ended and (head := waiting.head()) is not None:
            if before is not None and not waiting.served.goes_before(head.tenant, before.tenant):
                return
            if not step.room_for(head.tenant):
                return
            fits = step.takes(head)
            if not fits:
                self.goes_first = not went_first
            arrivals = self._admit(head, step) if fits else []
            if not arrivals:
                self._ended = True
                step.give_up(head.tenant)
                return
            for arrival in arrivals:
                waiting.take(arrival.sequence)
                running.add(arrival.sequence)
            waiting.hold_back_behind(head.tenant, running.requests)
            if len(arrivals) == 1 and running.shared_prefill.is_ready(head):
                step.add_new(head)
            else:
                for arrival in arrivals:
                    running.add_returning(arrival.sequence)
                self.plan_returns(step)
            if head.index == 0:
                waiting.expect_fork(head.request)

    def _admit(self, head: Seq, step: StepBuilder) -> list[Arrival]:
        """Takes blocks for the head of the queue and sequences admitted with it; an empty list if they do not fit."""
        group = self._group(head)
        # A preempted sequence is recomputed from its tokens, so tokens that steps in flight promise must arrive first.
        if any(sequence.seq_id != NO_SEQ_ID for sequence in group):
            return []
        arrivals = self._admit_together(group, step)
        if not arrivals and len(group) > 1 and self._come_apart(group):
            arrivals = self._admit_together([head], step)
        for arrival in arrivals:
            self._note(arrival, step)
        return arrivals

    def _group(self, head: Seq) -> list[Seq]:
        """The head and its waiting siblings that were admitted before, too, unless they are admitted one by one."""
        request = head.request
        alone = bool(self._running.order) and self._running.is_alone(request)
        if len(request.sequences) == 1 or request.apart or alone:
            return [head]
        waiting = sorted((s for s in request.sequences if s.state is SeqStatus.WAITING), key=key)
        return list(takewhile(lambda s: s.cached_tokens is not None, waiting)) or [head]

    def _admit_together(self, group: list[Seq], step: StepBuilder) -> list[Arrival]:
        """Takes blocks for the whole group; an empty list, with nothing taken, if slots are too few, or fewer blocks
        than the watermark would stay free.
        """
        head, pool = group[0], self._tables.pool
        request = head.request
        # Beams leave the executor after every step, so they can take turns in one slot.
        slots = len(group) if request.search is None else 1
        watermark, blocked = self._watermark(request), self._blocked
        self.refused = Refused(group, slots, 0)
        if len(self._running.order) + slots > self._tables.limits.max_running:
            return []
        if blocked is not None and blocked.sequence is head and blocked.count == len(group):
            self.refused = Refused(group, slots, blocked.free_needed + watermark)
            blocked.steps_left -= 1
            # If nothing is planned yet, there may be no later step in which to try again.
            looks_again = not step.plan.num_tokens or not blocked.steps_left
            if not looks_again and pool.num_free_for(request.tenant) < blocked.free_needed + watermark:
                return []
        self._blocked = None
        if len(request.sequences) == 1 or not self._tables.limits.fork_sharing:
            arrivals = [Arrival(sequence) for sequence in group]
        else:
            arrivals = pair_arrivals(group, pool.block_size)
        missing = self._tables.admit(arrivals, watermark)
        nobody = len(group) == 1 if not self._running.order else self._is_stuck(step)
        if missing and pool.tenants is not None and nobody:
            # No other sequence will free a block. Floors rose, or the pool shrank, since the request was accepted.
            missing = self._tables.admit(arrivals, watermark, over_floors=True)
        if missing:
            free = pool.num_free_for(request.tenant) + missing
            self._blocked = _Blocked(head, len(group), free - watermark, RETRY_STEPS)
            self.refused = Refused(group, slots, free)
            return []
        self.refused = None
        return arrivals

    def _is_stuck(self, step: StepBuilder) -> bool:
        """Whether neither this step, nor steps in flight, nor later ones compute anything, so no block will ever be
        freed: beams hold theirs while others of their search wait. A sequence that a bounded step passes over does
        decode later.
        """
        running = self._running
        under_way = step.plan.num_tokens or running.prefilling or running.returning or running.batch.decoding.any()
        return not under_way and not running.batch.pending.any()

    def _watermark(self, request: LiveRequest) -> int:
        """Blocks that an admission of this request leaves free."""
        # If no other request runs, the watermark protects nobody, and it could block a large prompt for ever.
        if self._running.is_alone(request):
            return 0
        return math.ceil(self._tables.limits.watermark * self._tables.pool.num_blocks)

    def _come_apart(self, group: list[Seq]) -> bool:
        """Whether sequences that did not fit together may be admitted one by one."""
        empty, request = not self._running.order, group[0].request
        request.steps_at_head += 1
        if request.search is None:
            never = len(group) > self._tables.limits.max_running or empty
            request.apart = never or request.steps_at_head >= PATIENCE_STEPS
            return request.apart
        # Beams wait until all of them fit, unless even an empty pool cannot hold them.
        return empty

    def _note(self, arrival: Arrival, step: StepBuilder) -> None:
        """Records which sibling an admitted sequence waits for and, at its first admission, its cached tokens."""
        sequence, sibling = arrival.sequence, arrival.sibling
        if sibling is not None and arrival.shared:
            end = arrival.shared * self._tables.pool.block_size
            self._running.shared_prefill.wait_for(sibling, sequence, end)
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sibling.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self._tables.counters.prompt_tokens += sequence.num_prompt
            self._tables.counters.cached_tokens += sequence.cached_tokens
            # Before the sequence publishes its own blocks, which would count as hits.
            step.plan.admitted.append(self._tables.admitted(arrival))
