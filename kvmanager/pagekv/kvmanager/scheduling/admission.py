"""Entries into the running order: forks, the waiting queue, and the sequences of a request that return together.

Sequences of one request that were preempted come back together and share again what they shared, unless they were never
admitted or do not fit together; beams wait for blocks as one (DESIGN 5, "A request returns whole where it fits").
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

# Steps after which a head of the queue that did not fit looks for newly cached blocks, even if none became free.
RETRY_STEPS = 16
# Steps, in all of a request's life, for which the head of the queue waits until what was preempted with it fits too;
# meanwhile nothing behind it is admitted.
PATIENCE_STEPS = 16


@dataclass(slots=True)
class _Blocked:
    """A head that did not fit, looked at again when enough is free, or some steps later, as others publish."""

    sequence: Seq
    # How many sequences were to come in together.
    count: int
    # Without the watermark, which is another one when others have left.
    free_needed: int
    steps_left: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Sequences at the head of the queue that did not fit together."""

    group: list[Seq]
    # Slots that they need, and how many blocks have to be free for them; 0: nobody has counted.
    slots: int
    free_blocks: int


@dataclass(slots=True)
class Admission:
    """Plans entries into the running order of one epoch."""

    _running: RunningQueue
    _tables: BlockTables
    _waiting: WaitingQueue
    _blocked: _Blocked | None = None
    # Whether the waiting queue is admitted from before anybody returns: its head found too few bytes in the step
    # before, and those that return, step after step, would leave it less for ever. Never in two steps running, for a
    # queue that stays deep would leave as little to those that return.
    goes_first: bool = False
    # The head of the queue does not fit into the step being planned.
    _ended: bool = False
    # The head for which the latest step had not blocks enough, or not slots.
    refused: Refused | None = None

    def next_prompt(self) -> Seq | None:
        """The sequence whose prompt the next step computes first, if any, as far as is known before: of the tenant that
        was served least, one under way or the head of the queue, where that one did not lack blocks or slots before.
        """
        served, head = self._waiting.served, self._waiting.head()
        if self.refused is not None and self.refused.group[0] is head:
            head = None
        first = min(self._running.prefilling, key=lambda each: (served.place(each.tenant), each.key), default=None)
        if head is None or (first is not None and not served.goes_before(head.tenant, first.tenant)):
            return first
        return head

    def plan_forks(self, step: StepBuilder) -> None:
        """Forks every request whose prompt has been computed by an earlier step. Where slots, budget, bytes or blocks
        do not suffice for all sequences of a request, they queue, and share the prompt's full blocks when they come in.
        """
        running, tables = self._running, self._tables
        for request in self._waiting.forking[:]:
            parent = request.sequences[0]
            if parent.state is SeqStatus.RUNNING and not running.batch.decoding[parent.seq_id]:
                continue  # its prompt is under way
            children = self._waiting.take_children(request)
            slots = tables.limits.max_running - len(running.order)
            blocks = tables.pool.num_free_for(request.tenant) - self._watermark(request)
            fits = len(children) <= min(step.room, slots, blocks) and step.takes(parent, len(children))
            may = children and parent.state in HOLDING and fits and tables.limits.fork_sharing
            # Each computes the last prompt position for itself.
            if may and tables.fork([parent] * len(children), children, recomputed=1):
                for child in children:
                    child.cached_tokens = parent.cached_tokens
                    running.add(child)
                    step.add_new(child)
            else:
                for child in children:
                    self._waiting.push(child)

    def plan_returns(self, step: StepBuilder) -> None:
        """Enters the members of the order that are not at the executor, as far as budget, bytes and sequence slots go:
        beams that a decision has given their next token, and sequences admitted together.
        """
        running = self._running
        # Beams return in step after step, and leave room for the head of the queue.
        half = self._waiting.head() is not None
        for sequence in running.returning[:]:
            # More beams may hold blocks than fit into the executor at once. Each leaves after a step, so the others
            # follow; and while there are as many nothing else is admitted, so what stays there leaves a slot.
            if not step.room or step.num_at_executor >= self._tables.limits.max_running:
                return
            if running.shared_prefill.is_ready(sequence):
                if not step.takes(sequence, half=half):
                    return
                step.add_new(sequence)

    def plan_prefills(self, step: StepBuilder, under_way: list[Seq]) -> None:
        """Goes on with the prompts under way, and then admits from the waiting queue in order: the first that does not
        fit blocks the others, so none starves. Where there are several tenants, those that were served least come
        first in both, and go in turns.
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
        """Admits heads of tenants that were served no more than the one of a sequence under way, `before`."""
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
        """Takes blocks for the head of the queue and those that come in with it; none where there is no room."""
        group = self._group(head)
        # A preempted sequence is recomputed from its tokens, so those still promised must arrive first.
        if any(sequence.seq_id != NO_SEQ_ID for sequence in group):
            return []
        arrivals = self._admit_together(group, step)
        if not arrivals and len(group) > 1 and self._come_apart(group):
            arrivals = self._admit_together([head], step)
        for arrival in arrivals:
            self._note(arrival, step)
        return arrivals

    def _group(self, head: Seq) -> list[Seq]:
        """The head and those of its request that were admitted before, too, unless they come one by one."""
        request = head.request
        alone = bool(self._running.order) and self._running.is_alone(request)
        if len(request.sequences) == 1 or request.apart or alone:
            return [head]
        waiting = sorted((s for s in request.sequences if s.state is SeqStatus.WAITING), key=key)
        return list(takewhile(lambda s: s.cached_tokens is not None, waiting)) or [head]

    def _admit_together(self, group: list[Seq], step: StepBuilder) -> list[Arrival]:
        """Takes blocks for all of these; none where that leaves no watermark, or slots are too few."""
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
            # With nothing planned there may be no later step to look again in.
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
            # Nobody is left to wait for: floors were raised, or the pool has shrunk, since the request was accepted.
            missing = self._tables.admit(arrivals, watermark, over_floors=True)
        if missing:
            free = pool.num_free_for(request.tenant) + missing
            self._blocked = _Blocked(head, len(group), free - watermark, RETRY_STEPS)
            self.refused = Refused(group, slots, free)
            return []
        self.refused = None
        return arrivals

    def _is_stuck(self, step: StepBuilder) -> bool:
        """Whether nothing is computed, now, by steps in flight or by later ones, so nobody will ever free a block:
        beams hold theirs while others of their search wait. A sequence that a bounded step passes over decodes later.
        """
        running = self._running
        under_way = step.plan.num_tokens or running.prefilling or running.returning or running.batch.decoding.any()
        return not under_way and not running.batch.pending.any()

    def _watermark(self, request: LiveRequest) -> int:
        """Blocks that an admission of this request leaves free."""
        # With no other running it protects nobody, and insisting on it could block a large prompt for ever.
        if self._running.is_alone(request):
            return 0
        return math.ceil(self._tables.limits.watermark * self._tables.pool.num_blocks)

    def _come_apart(self, group: list[Seq]) -> bool:
        """Whether sequences that did not fit together have waited for it long enough."""
        empty, request = not self._running.order, group[0].request
        request.steps_at_head += 1
        if request.search is None:
            never = len(group) > self._tables.limits.max_running or empty
            request.apart = never or request.steps_at_head >= PATIENCE_STEPS
            return request.apart
        # Beams that an empty pool cannot hold.
        return empty

    def _note(self, arrival: Arrival, step: StepBuilder) -> None:
        """After an admission: which sibling the sequence waits for, and what it found if it is the first admission."""
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
            # Before the sequence publishes its own blocks.
            step.plan.admitted.append(self._tables.admitted(arrival))
