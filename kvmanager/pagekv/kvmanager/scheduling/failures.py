"""Sequences that the executor gives up: what they wrote is void, and nothing of it is ever hit.

Blocks are published when the step that writes them is planned, so other sequences may have hit void ones, in the same
step or in steps in flight. Such sequences lose the tokens that they are promised and compute anew, as after a
preemption; the epoch goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Takes in what failed in a step that is being committed, before any of its tokens is: voids what the sequences
        wrote, and preempts those of other requests that may have read it. Returns the requests that have not ended,
        for the caller to finish, and why.
        """
        counts = dict(zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True))
        failed = {seq_id: self._running.batch.member(seq_id) for seq_id in reasons}
        ending = {sequence.request for sequence in failed.values()}
        for seq_id, sequence in failed.items():
            # The step computed the last known token, and what stands before it.
            start = sequence.num_tokens - counts.get(seq_id, 1)
            # Without a token sampled since it entered, nothing tells whether an earlier chunk, or a block that it hit,
            # is not what made it fail. Were that kept, every prompt that begins alike would fail.
            position = 0 if seq_id in plan.prefilled else start
            # Never in the order of a set, which is of addresses: the order of free blocks follows from it.
            for each in dict.fromkeys([sequence, *sequence.request.sequences]):
                self._tables.invalidate(each, position)
            self._void_readers(sequence, start, ending)
        live = {seq_id: s.request for seq_id, s in failed.items() if s.state is not SeqStatus.FINISHED}
        return {request: reasons[seq_id] for seq_id, request in live.items()}

    def _void_readers(self, failed: Seq, start: int, ending: set[LiveRequest]) -> None:
        """Voids what others with the same tokens up to `start` have behind: tokens alone find blocks."""
        prefix = failed.token_ids[: start + 1]
        readers: dict[LiveRequest, list[Seq]] = {}
        # All that hold blocks, wait to come back, or are promised tokens; each once.
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
