"""Which sequences give their blocks back when there are none left, and how.

The victim is the last of the running order, never one before the sequence in need. The sequences of one request, or the
beams of one search, are preempted together, and what they share is copied once. Only sequences that have not fitted
together before are preempted one by one.

Of another tenant that has no more than its floor nobody is preempted: what it gave back would be kept for it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.queues import RunningQueue, WaitingQueue
from pagekv.kvmanager.scheduling.sequence import HOLDING, LiveRequest, Seq, SeqStatus, key


@dataclass(slots=True)
class Preemption:
    """Victim choice of one epoch."""

    _running: RunningQueue
    _tables: BlockTables
    _waiting: WaitingQueue
    # Since the latest plan, and whether something was kept in the host pool.
    _preempted: list[tuple[Seq, bool]] = field(default_factory=list)

    def take_preempted(self) -> list[tuple[Seq, bool]]:
        """Sequences preempted since the last call; True where something was kept in the host pool."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def block_for(self, sequence: Seq) -> int:
        """One block for a sequence, preempting from the end of the order; -1 when that reached the sequence itself,
        which then waits.
        """
        while sequence.state is SeqStatus.RUNNING:
            # Alone it goes on as it is admitted alone, over floors that were not there when it was accepted.
            alone = len(self._running.order) == 1
            blocks = self._tables.allocate(1, sequence.request.tenant)
            if blocks is None and alone and self._tables.pool.tenants is not None:
                blocks = self._tables.allocate(1, sequence.request.tenant, over_floors=True)
            if blocks is not None:
                return int(blocks[0])
            if not self.preempt_behind(sequence):
                self._preempt_own(sequence.request)
        return -1

    def preempt_behind(self, sequence: Seq) -> bool:
        """Preempts the last request behind this sequence's, passing over requests preempted often enough while there is
        another. False when none is behind. The front of the order is never preempted so.
        """
        last, tenants = None, self._tables.pool.tenants
        for other in reversed(self._running.order):
            if other.request is sequence.request or other.key < sequence.key:
                break
            if _may_be_preempted(other):
                if tenants is not None and not tenants.yields(other.request.tenant, sequence.request.tenant):
                    continue
                if other.request.preemptions < self._tables.limits.preemption_limit:
                    last = other
                    break
                last = last or other
        if last is not None:
            self.preempt(last, apart=last.request.apart)
        return last is not None

    def _preempt_own(self, request: LiveRequest) -> None:
        """Nothing is behind a request that needs a block: the request waits whole until those before it have made room.
        The first of the order has outgrown the pool, and goes on with one sequence less, as does a request that came
        back one by one.
        """
        candidates = [s for s in self._running.order if _may_be_preempted(s)]
        if candidates[0].request is request and request.search is None:
            request.apart = True
        self.preempt([s for s in candidates if s.request is request][-1], apart=request.apart)

    def preempt(self, sequence: Seq, *, apart: bool = False) -> None:
        """Frees every block of a request, or of the one sequence `apart`; its sequences wait, and go on from what they
        find cached or swapped out. Tokens in flight still count, unless they are beams: those compute them again.
        """
        group = [sequence] if apart else sequence.request.sequences
        self._give_back([s for s in group if s.state in HOLDING and _may_be_preempted(s)])

    def recompute(self, request: LiveRequest, void: Container[Seq]) -> None:
        """Preempts a request in which these sequences hold blocks that are void."""
        self._give_back([s for s in request.sequences if s.state in HOLDING and (s in void or _may_be_preempted(s))])

    def _give_back(self, group: list[Seq]) -> None:
        members = sorted(group, key=key)
        for member in reversed(members):
            self._tables.counters.preemptions += 1
            member.preemptions += 1
            member.candidates = None
            self._running.remove(member, SeqStatus.WAITING)
        # All at once, before any of them frees its blocks, so that shared blocks are copied once.
        self._tables.swap_out(members)
        for member in reversed(members):
            self._tables.free(member)
            self._tables.counters.swap_preemptions += member.swapped is not None
            self._preempted.append((member, member.swapped is not None))
            self._waiting.push(member)

    def preempt_all(self) -> None:
        """Preempts every sequence but those whose last token is in flight."""
        for sequence in reversed(self._running.order[:]):
            if sequence.state is not SeqStatus.WAITING and _may_be_preempted(sequence):
                self.preempt(sequence)


def _may_be_preempted(sequence: Seq) -> bool:
    """A draining sequence gives its blocks back by itself very soon, unless it is a beam, which may have to wait for
    others.
    """
    return sequence.state is SeqStatus.RUNNING or sequence.request.search is not None
