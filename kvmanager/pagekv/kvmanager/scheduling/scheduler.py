"""Plans each step: continuous batching with chunked prefill under a token budget (DESIGN 5).

A step is planned for the state after the steps in flight: every token that these will sample is counted as promised,
though its value is unknown. So step N + 1 can be planned while step N runs. When a promised token turns out to end a
sequence, the step in flight has computed one token too many for the sequence, which is dropped.

While tenants compete, a step may have a bound; some decodes are then passed over (`scheduling/fairness/step_share.py`).

Order within a step: decodes; beams and other sequences that return; forks; prefills under way; admissions from the
waiting queue while token budget, bytes, slots and blocks last. If the head of the queue found too few bytes in the step
before, sequences that return come last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.tenant_order import fitted_floors
from pagekv.kvmanager.scheduling.admission import Admission
from pagekv.kvmanager.scheduling.beam_scheduler import BeamScheduler
from pagekv.kvmanager.scheduling.beam_search import BeamSearch
from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.counters import SchedulerCounters
from pagekv.kvmanager.scheduling.decode_batch import Rows
from pagekv.kvmanager.scheduling.failures import Failures
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.step_share import StepShare
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap
from pagekv.kvmanager.scheduling.fairness.visitors import Visitors
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.listener import SchedulerListener
from pagekv.kvmanager.scheduling.preemption import Preemption
from pagekv.kvmanager.scheduling.queues import RunningQueue, WaitingQueue
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_SEQ_ID, LiveRequest, Seq, SeqStatus, key
from pagekv.kvmanager.scheduling.step_builder import StepBuilder
from pagekv.kvmanager.scheduling.step_plan import Committed, StepPlan, StepResult

# Tenants count as competing for so many steps longer, so that a tenant that comes now and then finds short steps.
LINGERING_STEPS = 1000


class Scheduler:
    """Owns queues and blocks. Single-threaded; `schedule` and `commit` alternate, with at most two steps in flight."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        host: HostPool | None = None,
        listener: SchedulerListener | None = None,
    ) -> None:
        """`host`: where sequences are swapped out to; None: there is no host pool."""
        self._listener = SchedulerListener() if listener is None else listener
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        # Weights and floors by tenant.
        self._tenants: tuple[dict[int, float], dict[int, int]] = {}, {}
        # The bound of steps while tenants compete; None: only the limits apply.
        self._bound: StepBound | None = None
        # Steps left of LINGERING_STEPS.
        self._lingering = 0
        self._visitors = Visitors()
        self._begin_epoch(pool, limits, eos_token_ids, host)

    def _begin_epoch(
        self, pool: BlockPool, limits: SchedulerLimits, eos_token_ids: Iterable[int], host: HostPool | None
    ) -> None:
        waiting = self.waiting
        self.pool = pool
        self.host = HostPool(0, pool.block_size) if host is None else host
        self.limits = limits
        weights, floors = self._tenants
        # This pool may be smaller than the one before, so floors are fitted to it.
        pool.set_tenants(weights, fitted_floors(floors, pool.num_blocks) if limits.prefix_cache else {})
        self._eos = tuple(eos_token_ids)
        self._tables = tables = BlockTables(pool, self.host, limits, self.counters)
        self._running = running = RunningQueue(pool.block_size)
        self.preemption = Preemption(running, tables, waiting)
        self._admission = Admission(running, tables, waiting)
        self._failures = Failures(running, tables, waiting, self.preemption)
        self._beams = BeamScheduler(running, tables, waiting, self.preemption)
        self._share = StepShare(running.batch, self._admission, waiting.served)
        self._listener.epoch_began(pool, self.host, limits, self._eos)

    @property
    def running(self) -> list[Seq]:
        """Sequences that hold blocks, in running order. Not to be changed."""
        return self._running.order

    def num_running_requests(self, tenant: int) -> int:
        """Requests of a tenant that hold blocks."""
        return self._running.requests.count(tenant)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks: those in the queue and those that wait for a fork."""
        return len(self.waiting) + self.waiting.num_forking

    def add(self, request: LiveRequest) -> None:
        """Queues a request: its sequence 0; the others follow by fork."""
        self._listener.adding(request)
        if request.command.sampling.beam_width:
            request.search = BeamSearch(request.command.sampling, request.command.n, self._eos)
        self.waiting.add(request)

    def set_tenants(
        self, weights: Mapping[int, float], floors: Mapping[int, int], caps: Mapping[int, Cap] | None = None
    ) -> None:
        """Sets weights and floors, as `BlockPool.set_tenants` does, and caps; all of them hold for later epochs, too.
        Without a prefix cache floors are ignored, because nothing is cached. A request accepted before floors rose may
        take blocks below them if it runs alone and cannot go on otherwise.
        """
        # Floors that are in force may have been set for a larger pool.
        fitted = fitted_floors(floors, self.pool.num_blocks) if floors == self._tenants[1] else floors
        self.pool.set_tenants(weights, fitted if self.limits.prefix_cache else {})
        self.waiting.served.set_weights(weights)
        self.waiting.caps = dict(caps or {})
        self._tenants = dict(weights), dict(floors)
        self._listener.tenants_set(*self._tenants, self.waiting.caps)

    @property
    def competing(self) -> bool:
        """Whether more than one tenant has sequences, or had some within the last LINGERING_STEPS steps."""
        return self.waiting.served.several and (self._lingering > 0 or self._are_several())

    def _are_several(self) -> bool:
        return len(self._running.tenants.keys() | self.waiting.tenants) > 1

    # -- planning

    def set_bound(self, bound: StepBound) -> None:
        """Sets the bound of steps while tenants compete."""
        if bound != self._bound:
            self._bound = bound
            self._listener.bound_set(bound)

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None when there is nothing to do now."""
        try:
            plan = self._plan()
        except InvariantError as error:
            self._listener.scheduled(None)
            self._listener.failed(error)
            raise
        self._listener.scheduled(plan)
        return plan

    def _plan(self) -> StepPlan | None:
        running = self._running
        if self.waiting.served.several:
            self._greet()
            self._make_room()
        step = StepBuilder(running, self._tables, self.waiting.served)
        if running.returning:
            self._beams.allocate_slots()
        self._plan_decodes(step)
        under_way = running.prefilling[:]
        first = self._admission.goes_first
        if running.returning and not first:
            self._admission.plan_returns(step)
        if self.waiting.forking:
            self._admission.plan_forks(step)
        self._admission.plan_prefills(step, under_way)
        if running.returning and first:
            self._admission.plan_returns(step)
        self.pool.table.map.sweep()
        plan = step.finish()
        if plan is not None:
            plan.preempted = self.preemption.take_preempted()
        return plan

    def _greet(self) -> None:
        """Determines newcomers, if steps are bounded, and visitors."""
        served, running = self.waiting.served, self._running.tenants
        several = self._are_several()
        self._lingering = LINGERING_STEPS if several else max(0, self._lingering - 1)
        if self._bound is not None and several:
            served.greet(running, self.waiting.tenants, self.limits.max_batch_tokens)
        else:
            served.welcome_nobody()
        self._visitors.see(running.keys() | self.waiting.tenants, served.newcomers)

    def _make_room(self) -> None:
        """Preempts for the head of the queue if its tenant has less than its share, before anything else is planned."""
        refused = self._admission.refused
        if refused is not None and refused.group[0] is self.waiting.head():
            self.preemption.make_room(refused.group, refused.slots, refused.free_blocks)

    def _plan_decodes(self, step: StepBuilder) -> None:
        """Plans one token for every decoding sequence, except those that a bounded step passes over. The token budget
        suffices for all: a sequence began to decode in a step that had a token left for it besides the decodes.
        """
        batch = self._running.batch
        rows = batch.decoding_rows()
        bound = self._bound if self.competing else None
        newcomer = None if bound is None else self._share.newcomer()
        # A step with a newcomer's prompt is the one that the newcomer waits for, so it keeps the longer bound.
        if bound is not None and newcomer is None and self._visitors:
            bound = bound.beside_visitors()
        if not len(rows):
            if bound is not None:
                step.leave(bound.left_beside(0), newcomer=newcomer)
            return
        full, exhausted = batch.full(rows), batch.exhausted(rows)
        filled = batch.sequences(full)
        if filled:
            # Also for sequences that end here: a block that their last token completed can be hit from now on.
            self._publish(full, filled, computed_now=False)
        if len(exhausted):
            for sequence in batch.sequences(exhausted):
                self._running.drain(sequence)
            rows = batch.decoding_rows()
        passed = rows[:0]
        if bound is not None:
            passed = self._share.passed_over(rows, bound, newcomer=newcomer is not None)
            rows = np.setdiff1d(rows, passed, assume_unique=True)
        if bound is not None or len(exhausted):
            full = batch.full(rows)
            filled = batch.sequences(full)
        if filled and self._allocate_slots(step, full, filled):
            rows = rows[batch.decoding[rows]]
            passed = passed[batch.decoding[passed]]
        completed = step.add_decodes(rows)
        if bound is not None:
            step.add_passed_over(passed)
            step.leave(bound.left_beside(len(rows)), newcomer=newcomer)
        if len(completed):
            self._publish(completed, batch.sequences(completed), computed_now=True)

    def _publish(self, rows: Rows, sequences: list[Seq], *, computed_now: bool) -> None:
        """Publishes the last block of each of these sequences, unless it is published already. It is full of known
        tokens, and computed by a step in flight or, if `computed_now`, by the step being planned. `rows`: the
        sequences' rows, ascending.

        vLLM caches blocks at the same two moments: `KVCacheManager.allocate_slots` caches those whose tokens are known,
        and `AsyncScheduler` the others when the result arrives.
        """
        due = [at for at, sequence in enumerate(sequences) if sequence.num_published < len(sequence.block_table)]
        if len(due) < len(sequences):
            rows, sequences = rows[due], [sequences[at] for at in due]
        tokens, raw = self._running.batch.complete_blocks(rows)
        self._tables.publisher.publish_last(sequences, tokens, raw, computed_now=computed_now)

    def _allocate_slots(self, step: StepBuilder, rows: Rows, sequences: list[Seq]) -> bool:
        """Allocates one more block for each of these sequences, whose tables are full; True if it had to preempt."""
        blocks = self._tables.allocate_each(sequences)
        preempts = blocks is None
        if blocks is None:
            found = self._allocate_one_by_one(sequences)
            sequences = list(found)
            rows = np.array([sequence.seq_id for sequence in sequences], np.intp)
            blocks = np.array(list(found.values()), np.int32)
        for sequence, block in zip(sequences, blocks.tolist(), strict=True):
            sequence.block_table.append(block)
        self._running.batch.slots[rows] += self.pool.block_size
        step.plan.append_seq_ids += rows.tolist()
        step.plan.append_blocks += blocks.tolist()
        return preempts

    def _allocate_one_by_one(self, sequences: list[Seq]) -> dict[Seq, int]:
        """Allocates a block for each of these sequences, in running order, so that no request is preempted after it got
        its block, except for another tenant. Returns the sequences that still run in the end, with their blocks.
        """
        found: dict[Seq, int] = {}
        for sequence in sorted(sequences, key=key):
            block = self.preemption.block_for(sequence)
            if block >= 0:
                found[sequence] = block
        for sequence in [sequence for sequence in found if sequence.state is not SeqStatus.RUNNING]:
            # Preempted since: with its request, of which another sequence found no block, or for another tenant.
            self.pool.free(np.array([found.pop(sequence)], np.int32))
        return found

    # -- results

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Commits a step's tokens; finishes sequences that ended and requests that failed. Tokens for sequences that
        have finished since are dropped. Raises InvariantError if the result does not fit the plan.
        """
        self._listener.committing(plan, result)
        try:
            return self._commit(plan, result)
        except InvariantError as error:
            self._listener.failed(error)
            raise

    def _commit(self, plan: StepPlan, result: StepResult) -> Committed:
        batch, rows = self._running.batch, plan.sampling
        kept, sampled = result.sampled_seq_ids, result.sampled_tokens
        if not len(kept) == len(sampled) <= len(rows):
            raise InvariantError(f"step {result.step}: {len(sampled)} tokens of {len(kept)} sequences, not {len(rows)}")
        batch.pending[batch.span(rows)] -= 1
        failed = self._take_failed(plan, result) if result.failed else []
        if len(kept) < len(rows):
            rows = np.array(kept, np.intp)
        # Through an array, which takes a third of the time of np.array.
        tokens = np.frombuffer(array("I", sampled), np.uint32)
        alive = batch.alive[batch.span(rows)]
        if np.count_nonzero(alive) < len(rows):
            rows, tokens = rows[alive], tokens[alive]  # drops the one token too many
            kept, sampled = rows.tolist(), tokens.tolist()
        known = batch.append(rows, tokens)
        self.counters.generated_tokens += len(rows)
        if self.waiting.served.several:
            self.waiting.served.charge_outputs(batch.tenants[rows])
        sequences = batch.sequences(rows)
        endings = batch.check_stop(rows, tokens, known, self._eos)
        for position in endings:
            self._finish(sequences[position])
        searched = self._beams.take_candidates(plan, result) if plan.beams else []
        batch.settle()
        return Committed(sequences, kept, sampled, endings, searched, failed)

    def _take_failed(self, plan: StepPlan, result: StepResult) -> list[tuple[LiveRequest, str]]:
        """Finishes the requests of sequences that failed; returns each request once, with the reason."""
        requests = self._failures.take(plan, result.failed)
        for request in requests:
            for sequence in request.sequences:
                self._finish(sequence)
        return list(requests.items())

    # -- endings

    def finish(self, sequence: Seq) -> None:
        """Ends a sequence in any state; its blocks are free for the very next step. Idempotent."""
        self._listener.finishing(sequence)
        self._finish(sequence)

    def _finish(self, sequence: Seq) -> None:
        state = sequence.state
        if state in HOLDING:
            self._running.remove(sequence, SeqStatus.FINISHED)
            self._tables.free(sequence)
        elif state is not SeqStatus.FINISHED:
            if sequence.seq_id != NO_SEQ_ID:
                self._running.batch.remove(sequence, finished=True)
            self._tables.swapper.release(sequence)
            self.waiting.remove(sequence)
            if state is SeqStatus.WAITING and sequence.index == 0:
                # Sequence 0 no longer computes the prompt for the others, so each of them waits for admission.
                for child in self.waiting.take_children(sequence.request):
                    self.waiting.push(child)

    def remove(self, request: LiveRequest) -> None:
        """Removes a finished request. Breaks the reference cycle, so its sequences need no garbage collector."""
        self.waiting.take_children(request)
        request.sequences = []

    def preempt_all(self) -> None:
        """Preempts every running sequence except those whose last token is in flight."""
        self._listener.preempting_all()
        self.preemption.preempt_all()

    def clear_prefix_cache(self) -> int:
        """Empties both tiers of the prefix cache; returns how many device blocks it had. Held blocks stay held, and
        never come back under their digests.
        """
        self._listener.clearing_cache()
        for sequence in self._running.order:
            sequence.publishes = False
        for sequence in self.waiting:
            if sequence.swapped is not None:
                sequence.publishes = False
        self.host.clear()
        return self.pool.clear_prefix_table()

    def lose_executor(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        host: HostPool | None = None,
    ) -> None:
        """Begins a new epoch with empty pools: all running sequences wait again and are recomputed from their tokens.
        Tokens that steps in flight promised never arrive; the same tokens will be sampled again.
        """
        lost, lost_pool, lost_host = self._running, self.pool, self.host
        lost.batch.clear()
        for sequence in lost.order:
            self._tables.discard(sequence)
            sequence.candidates = None
            self.waiting.push(sequence)
        self._begin_epoch(pool, limits, eos_token_ids, host)
        self.pool.evictions += lost_pool.evictions
        self.pool.hash_alarms += lost_pool.hash_alarms
        self.host.evictions += lost_host.evictions
        self.host.hash_alarms += lost_host.hash_alarms
