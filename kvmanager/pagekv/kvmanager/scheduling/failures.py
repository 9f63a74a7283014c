"""Sequences that the executor reports as failed: the content that they wrote is void and is never hit.

Blocks are published when the step that writes them is planned, so other sequences may have hit void blocks, in the same
step or in steps in flight. Such sequences lose their promised tokens and are recomputed, as after a preemption; the
epoch goes on.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.preemption import Preemption
from pagekv.kvmanager.scheduling.queues import RunningQueue, WaitingQueue
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures in one epoch."""

    _running: RunningQueue
    _tables: BlockTables
    _waiting: WaitingQueue
    _preemption: Preemption

    def take(self, plan: StepPlan, reasons: Mapping[int, str]) -> dict[LiveRequest, str]:
        """Takes in the failures of a step before its tokens are committed: voids what the failed sequences wrote, and
        preempts sequences of other requests that may have read it, which may themselves be among the failed ones.
        Returns the failed requests that have to end, which the caller must finish, with the reason of each.
        """
        counts = dict(zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True))
        failed = {seq_id: self._running.batch.member(seq_id) for seq_id in reasons}
        # The step computed the last known token and the scheduled tokens before it.
        starts = {seq_id: sequence.num_tokens - counts.get(seq_id, 1) for seq_id, sequence in failed.items()}
        ending = {
            sequence.request: reasons[seq_id]
            for seq_id, sequence in failed.items()
            if self._is_due(sequence) and not (seq_id in plan.prefilled and _has_read(seq_id, failed, starts))
        }
        for seq_id, sequence in failed.items():
            start = starts[seq_id]
            # If the sequence has sampled nothing since it entered, an earlier chunk, or a block that it hit, may be the
            # cause. If these stayed cached, every prompt with the same beginning would fail.
            position = 0 if seq_id in plan.prefilled else start
            # Not a set: it iterates in the order of addresses, and the order of free blocks, which must be
            # reproducible, follows from this loop.
            for each in dict.fromkeys([sequence, *sequence.request.sequences]):
                self._tables.invalidate(each, position)
            self._void_readers(sequence, start, ending)
        return ending

    def _is_due(self, sequence: Seq) -> bool:
        """Whether the sequence's answer counts: it has not finished, nor is it recomputed because what it read was
        void.
        """
        if sequence.request.search is not None:
            return sequence.state is SeqStatus.DRAINING
        return sequence.state is not SeqStatus.FINISHED and bool(self._running.batch.alive[sequence.seq_id])

    def _void_readers(self, failed: Seq, start: int, ending: Container[LiveRequest]) -> None:
        """Voids, from `start` on, the content of other requests whose tokens up to there are the same: they may have
        hit the failed sequence's blocks.
        """
        prefix = failed.token_ids[: start + 1]
        readers: dict[LiveRequest, list[Seq]] = {}
        # All sequences that hold blocks, wait, or have promised tokens; each once.
        for sequence in dict.fromkeys([*self._running.batch.members(), *self._running.order, *self._waiting]):
            request = sequence.request
            alike = request not in ending and request.root == failed.request.root
            if alike and sequence.token_ids[: start + 1] == prefix:
                readers.setdefault(request, []).append(sequence)
        for request, void in readers.items():
            for sequence in void:
                self._running.batch.drop_promised(sequence)
                self._tables.invalidate(sequence, start)
            self._preemption.recompute(request, void)


def _has_read(seq_id: int, failed: Mapping[int, Seq], starts: Mapping[int, int]) -> bool:
    """Whether a failed sequence may have hit blocks that another request's failed sequence wrote in the same step: it
    begins with the same tokens, and computed fewer of them. So the one that computed most of them is no reader.
    """
    reader = failed[seq_id]
    for other, sequence in failed.items():
        end = starts[other] + 1
        alike = sequence.request is not reader.request and sequence.request.root == reader.request.root
        if alike and end <= starts[seq_id] and sequence.token_ids[:end] == reader.token_ids[:end]:
            return True
    return False
