"""Who computes what in the next step: continuous batching with chunked prefill under a token budget (DESIGN 5).

A step is planned from what will be true once the steps in flight are done: every sampled token they promise is
counted though its value is unknown, so step N + 1 can be planned while step N runs. When a promised token turns out to
end a sequence, the step in flight has computed one token too many for it, which is dropped.

Order within a step: decodes first; then beams and forks; then prefills under way; then admissions from the waiting
queue while budget, sequence slots and blocks last. Only decodes and beams need blocks beyond those taken at admission,
so only they preempt, and the victim, the last of the running order, never stands before the one that needs the block.

Sequences that decode live in `SequenceRows`, so that a step costs a fixed number of vector operations and Python work
only for the few that cross a block border, begin or end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.scheduling.admission import Admission
from pagekv.kvmanager.scheduling.beam_scheduler import begin_search, give_blocks, take_candidates
from pagekv.kvmanager.scheduling.decode_batch import Rows, span
from pagekv.kvmanager.scheduling.running_queue import RunningQueue, SchedulerCounters, SchedulerLimits, key
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_SEQ_ID, LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import Committed, StepPlan, StepResult
from pagekv.kvmanager.scheduling.stop_check import find_endings
from pagekv.kvmanager.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Owns the queues and, through `tables`, every block. Single-threaded; `schedule` and `commit` alternate freely,
    with at most two steps in flight.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        on_admission: Callable[[Seq], None] = lambda sequence: None,
        host: HostPool | None = None,
    ) -> None:
        """`on_admission` is called with every sequence that gets its blocks for the first time, before it publishes.
        `host` is where sequences are swapped out to; None: nowhere.
        """
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        host = HostPool(0, pool.block_size) if host is None else host
        self._running = RunningQueue(pool, host, limits, self.waiting, self.counters)
        self._rows = self._running.rows
        self._eos = tuple(eos_token_ids)
        self._admission = Admission(self._running, on_admission)

    @property
    def pool(self) -> BlockPool:
        """The pool of the present epoch."""
        return self._running.pool

    @property
    def host(self) -> HostPool:
        """The host pool of the present epoch."""
        return self._running.host

    @property
    def limits(self) -> SchedulerLimits:
        """The bounds of the present epoch."""
        return self._running.limits

    @property
    def running(self) -> list[Seq]:
        """Sequences that hold blocks, first to be served first. Not to be changed."""
        return self._running.order

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks: those in the queue and those that wait for a fork."""
        return len(self.waiting) + self._running.num_forking

    # -- entering

    def add(self, request: LiveRequest) -> None:
        """Queues a request: its sequence 0; the others follow by fork."""
        if request.command.sampling.beam_width:
            begin_search(request, self._eos)
        self.waiting.push(request.sequences[0])
        self._running.num_forking += len(request.sequences) - 1

    # -- planning

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None when there is nothing to do now."""
        running, budget = self._running, self._running.limits.max_batch_tokens
        plan = StepPlan(finished=running.leaving)
        running.tables.begin_step()
        if running.returning:
            give_blocks(running)
        decodes = self._plan_decodes(plan, budget)
        plan.num_tokens = len(decodes)
        sampling: list[int] = []
        under_way = list(running.prefilling)
        if running.returning:
            self._admission.plan_returns(plan, budget, sampling)
        if self._admission.forking:
            self._admission.plan_forks(plan, budget, sampling)
        for sequence in under_way:
            running.plan_chunk(plan, sequence, budget, sampling)
        self._admission.plan_admissions(plan, budget, sampling)
        plan.moves = running.tables.take_moves()
        plan.sampling = np.sort(np.concatenate([decodes, np.array(sampling, np.intp)])) if sampling else decodes
        if not (plan.num_tokens or plan.finished or plan.moves):
            return None
        running.leaving = list(plan.beams)
        plan.preempted, running.preempted = running.preempted, []
        return plan

    def _plan_decodes(self, plan: StepPlan, budget: int) -> Rows:
        """One token for every sequence whose last token is known or promised; returns their seq_ids, ascending."""
        rows_of = self._rows
        rows = rows_of.decoding_rows()
        if not len(rows):
            return rows
        at = span(rows)
        last = rows_of.computed[at] >= rows_of.last_input[at]
        if np.count_nonzero(last):
            # The last token it may have is promised already: leave the executor, keep the blocks until it is here.
            for sequence in rows_of.of(rows[last]):
                sequence.state = SeqStatus.DRAINING
                rows_of.stop_decoding(sequence)
                plan.finished.append(sequence.seq_id)
            rows = rows_of.decoding_rows()
        others: list[int] = []
        if len(rows) > budget:
            rows, others = self._first_in_order(budget)
        at = span(rows)
        full = rows_of.computed[at] == rows_of.slots[at]
        if np.count_nonzero(full) and self._grow(plan, rows[full]):
            rows = rows[rows_of.decoding[rows]]
            at = span(rows)
        for seq_id in others:
            if rows_of.decoding[seq_id]:
                self._sit_out(plan, seq_id)
        rows_of.computed[at] += 1
        rows_of.pending[at] += 1
        return rows

    def _first_in_order(self, count: int) -> tuple[Rows, list[int]]:
        """The first `count` of the running order that decode, ascending by seq_id, and the others."""
        seq_ids = [s.seq_id for s in self.running if self._rows.decoding[s.seq_id]]
        return np.array(sorted(seq_ids[:count]), np.intp), seq_ids[count:]

    def _grow(self, plan: StepPlan, rows: Rows) -> bool:
        """One more block for each of these decodes, whose tables are full; True if that preempted sequences."""
        chunks = self._rows.complete_blocks(rows)
        sequences = self._rows.of(rows)
        running = self._running
        blocks = running.tables.allocate(len(rows))
        exhausted = blocks is None
        if blocks is None:
            # In running order, so that of another request nobody is preempted after it got its block.
            order = sorted(range(len(rows)), key=lambda position: sequences[position].key)
            got = [(position, block) for position in order if (block := running.block_for(sequences[position])) >= 0]
            for position, block in got:
                if sequences[position].state is not SeqStatus.RUNNING:
                    # Another sequence of its request found no block, and they wait together.
                    running.pool.free(np.array([block], np.int32))
            got = [(position, block) for position, block in got if sequences[position].state is SeqStatus.RUNNING]
            kept = [position for position, _ in got]
            rows, chunks, sequences = rows[kept], chunks[kept], [sequences[position] for position in kept]
            blocks = np.array([block for _, block in got], np.int32)
        running.tables.grow(sequences, blocks, chunks)
        self._rows.slots[rows] += running.pool.block_size
        plan.append_seq_ids += rows.tolist()
        plan.append_blocks += blocks.tolist()
        return exhausted

    @staticmethod
    def _sit_out(plan: StepPlan, seq_id: int) -> None:
        plan.scheduled_seq_ids.append(seq_id)
        plan.scheduled_tokens.append(0)

    # -- results

    def commit(self, plan: StepPlan, outcome: StepResult) -> Committed:
        """Takes in a step's tokens and finishes sequences that ended. Tokens for sequences that have finished since
        are dropped. Raises InvariantError when the outcome does not answer the plan.
        """
        rows_of, rows = self._rows, plan.sampling
        seq_ids, sampled = outcome.sampled_seq_ids, outcome.sampled_tokens
        if len(seq_ids) != len(sampled):
            raise InvariantError(f"step {outcome.step} sampled {len(sampled)} tokens for {len(seq_ids)} sequences")
        kept = rows.tolist()
        if seq_ids != kept:
            # The executor reports them in the order they came to it.
            order = sorted(range(len(seq_ids)), key=seq_ids.__getitem__)
            if [seq_ids[position] for position in order] != kept:
                odd = sorted(set(seq_ids) ^ set(kept))[:8]
                raise InvariantError(f"step {outcome.step} sampled other sequences than planned, such as {odd}")
            sampled = [sampled[position] for position in order]
        # Through an array, which takes a third of the time of np.array.
        tokens = np.frombuffer(array("I", sampled), np.uint32)
        at = span(rows)
        rows_of.pending[at] -= 1
        alive = rows_of.alive[at]
        if np.count_nonzero(alive) < len(rows):
            rows, tokens = rows[alive], tokens[alive]  # without the one token too many
            kept, sampled = rows.tolist(), tokens.tolist()
        known = rows_of.append(rows, tokens)
        self.counters.generated_tokens += len(rows)
        sequences = rows_of.of(rows)
        endings = find_endings(rows_of, rows, tokens, known, self._eos)
        for position in endings:
            self.finish(sequences[position])
        searched = take_candidates(self._running, plan, outcome) if plan.beams else []
        rows_of.settle()
        return Committed(sequences, kept, sampled, endings, searched)

    # -- leaving

    def finish(self, sequence: Seq) -> None:
        """Ends a sequence in any state; its blocks are free for the very next step. Idempotent."""
        running, state = self._running, sequence.state
        if state is SeqStatus.FORKING:
            running.num_forking -= 1
        elif state is SeqStatus.WAITING:
            if sequence.seq_id != NO_SEQ_ID:
                self._rows.leave(sequence, finished=True)
            sequence.state = SeqStatus.FINISHED
            running.tables.drop_swapped(sequence)
            self.waiting.forget()
        elif state is not SeqStatus.FINISHED:
            running.release(sequence)
        sequence.state = SeqStatus.FINISHED
        if sequence.index == 0 and state is SeqStatus.WAITING:
            # Nobody computes the prompt for the others any more.
            running.queue(s for s in sequence.request.sequences if s.state is SeqStatus.FORKING)

    def forget(self, request: LiveRequest) -> None:
        """All its sequences have finished. They point at it: without pointing back, so that what they hold goes with
        the last of them, and not when the garbage collector comes.
        """
        self._admission.forget(request)
        request.sequences = []

    def preempt_all(self) -> None:
        """Makes running sequences give their blocks back and wait; they are recomputed. Those whose last token is in
        flight keep theirs until it has come.
        """
        self._running.preempt_all()

    def lose_executor(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        host: HostPool | None = None,
    ) -> None:
        """A new epoch with empty pools: everything running waits again and is recomputed from its tokens. Tokens that
        steps in flight promised never come and will be sampled again, the same ones.
        """
        host = HostPool(0, pool.block_size) if host is None else host
        lost = self._running
        lost.lose()
        pool.evictions += lost.pool.evictions
        pool.hash_alarms += lost.pool.hash_alarms
        host.evictions += lost.host.evictions
        host.hash_alarms += lost.host.hash_alarms
        self._running = RunningQueue(pool, host, limits, self.waiting, self.counters)
        self._running.num_forking = lost.num_forking
        self._rows = self._running.rows
        self._eos = tuple(eos_token_ids)
        self._admission.new_epoch(self._running)

    def clear_prefix_cache(self) -> int:
        """Forgets what is cached in both tiers; returns how many blocks of the device were. What is held stays held."""
        self.host.clear()
        return self.pool.clear_prefix_table()

    # -- proof

    def check_integrity(self, live: Iterable[Seq], pins: Iterable[Sequence[int]] = ()) -> None:
        """Recomputes block counts and queue lengths from the live sequences and the blocks of each pin; raises
        InvariantError.
        """
        sequences = list(live)
        held = [s for s in sequences if s.state in HOLDING]
        self.pool.check_integrity([*(s.block_table for s in held), *pins])
        # What is swapped out was kept in the pool of its epoch, which is gone with it.
        self.host.check_integrity([s.swapped.held() for s in sequences if s.swapped and s.swapped.pool is self.host])
        if sorted(held, key=key) != self.running:
            raise InvariantError(f"{len(held)} sequences hold blocks, the running order has {len(self.running)}")
        waiting = sum(1 for s in sequences if s.state is SeqStatus.WAITING)
        if waiting != len(self.waiting):
            raise InvariantError(f"{waiting} sequences wait, the waiting queue counts {len(self.waiting)}")
        forking = {s.request.arrival for s in sequences if s.state is SeqStatus.FORKING}
        if self._running.num_forking != sum(1 for s in sequences if s.state is SeqStatus.FORKING):
            raise InvariantError(f"{self._running.num_forking} sequences are counted that wait for a fork")
        parents = {request.arrival for request in self._admission.forking}
        parents |= {s.request.arrival for s in sequences if s.index == 0 and s.state is SeqStatus.WAITING}
        if not forking <= parents:
            raise InvariantError(f"requests {sorted(forking - parents)} wait for a fork that nobody makes")
        # Beams are at the executor only while they compute, and those that return are not there yet.
        returning = self._running.returning
        self._rows.check_integrity(
            [s for s in held if s.seq_id != NO_SEQ_ID or (s.request.search is None and s not in returning)]
        )
        for s in held:
            covered = -(-max(len(s.token_ids), s.num_computed) // self.pool.block_size)
            if not s.num_computed <= s.num_total <= s.max_total or covered not in (
                len(s.block_table),
                len(s.block_table) + 1,
            ):
                raise InvariantError(
                    f"sequence {s.key}: {s.num_computed} computed of {s.num_total} (at most {s.max_total}) in "
                    f"{len(s.block_table)} blocks of {self.pool.block_size}"
                )
