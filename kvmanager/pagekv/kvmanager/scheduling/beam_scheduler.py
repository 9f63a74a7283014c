"""Beam search over the block pool: beams fork, share their past, copy the block they write, and are dropped.

Every live beam computes one position per step and reports its likeliest tokens. When all beams of a search have
reported, the search decides which continuations live on. The first continuation of a beam keeps the beam's block table.
Further ones share its full blocks and get a copy of the block that they will write. A beam without a continuation frees
its private blocks at once. The decision needs the step's result, so when steps are sent ahead a search takes part in
every second step.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.scheduling.beam_search import Continuation
from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.preemption import Preemption
from pagekv.kvmanager.scheduling.queues import RunningQueue, WaitingQueue
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class BeamScheduler:
    """Beams of one epoch."""

    _running: RunningQueue
    _tables: BlockTables
    _waiting: WaitingQueue
    _preemption: Preemption

    def allocate_slots(self) -> None:
        """Allocates a block for every returning beam whose table is full. May preempt, so it comes first in a step."""
        for sequence in self._running.returning[:]:
            if sequence.num_computed == len(sequence.block_table) * self._tables.pool.block_size:
                block = self._preemption.block_for(sequence)
                if block >= 0:
                    self._tables.publisher.publish(sequence)
                    sequence.block_table.append(block)

    def take_candidates(self, plan: StepPlan, result: StepResult) -> list[LiveRequest]:
        """Takes in the likeliest tokens that beams reported, and advances each search whose beams have all reported.
        Returns the requests whose search is done.
        """
        heard: dict[int, LiveRequest] = {}
        for seq_id, sequence in plan.beams.items():
            if sequence.seq_id != seq_id or sequence.state is not SeqStatus.DRAINING:
                continue  # preempted or aborted since
            self._running.batch.remove(sequence, finished=False)
            sequence.candidates = list(result.logprobs[seq_id].top)
            heard[sequence.request.arrival] = sequence.request
        done = []
        for request in heard.values():
            if all(sequence.candidates is not None for sequence in request.sequences) and self._advance(request):
                done.append(request)
        return done

    def _advance(self, request: LiveRequest) -> bool:
        """Makes one decision. Returns True if it was the last one of the search; then all its blocks are freed."""
        search, beams = request.search, request.sequences
        assert search is not None
        continuing = search.advance([beam.candidates or [] for beam in beams])
        self._tables.counters.generated_tokens += len(continuing)
        self._waiting.served.charge_output(request.command.tenant.number, len(continuing))
        going_on = {continuation.parent for continuation in continuing}
        for index, beam in enumerate(beams):
            if index not in going_on:
                self._running.remove(beam, SeqStatus.FINISHED)
                self._tables.free(beam)
        if search.done:
            return True
        self._fork(request, continuing)
        return False

    def _fork(self, request: LiveRequest, continuing: list[Continuation]) -> None:
        """Makes `request.sequences` the beams that live on, best first, each with its next token."""
        beams = request.sequences
        kept: set[int] = set()
        parents: list[Seq] = []
        children: list[Seq] = []
        following: list[Seq] = []
        serial = 1 + max(beam.index for beam in beams)
        for continuation in continuing:
            sequence = parent = beams[continuation.parent]
            if continuation.parent in kept:
                sequence = parent.branch(serial + len(children))
                parents.append(parent)
                children.append(sequence)
            kept.add(continuation.parent)
            following.append(sequence)
        forked = False
        # Checked again after each preemption: copying the victim's blocks out may leave no room for the fork's copies.
        while self._tables.may_fork(children, recomputed=0):
            forked = self._tables.fork(parents, children, recomputed=0)
            # Like a decode, a search preempts requests behind it.
            if forked or not self._preemption.preempt_behind(beams[0]):
                break
        for continuation, sequence in zip(continuing, following, strict=True):
            sequence.token_ids.append(continuation.token_id)
            sequence.candidates = None
        request.sequences = following
        if forked:
            for child in children:
                self._running.add(child)
            for sequence in following:
                self._running.add_returning(sequence)
        else:
            # The fork is refused whole: no beam goes on until all can. Either no request is behind this one, or the
            # step has no room for copies, and preempting others would only add copies.
            for child in children:
                self._waiting.push(child)
            self._preemption.preempt(following[0])
