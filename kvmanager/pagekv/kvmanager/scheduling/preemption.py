"""Preemption: which sequences give their blocks back when no block is free.

The victim is the last request of the running order, never one before the sequence that needs a block. With several
tenants it is the last request of the tenant with the largest share for its weight, regardless of arrival. The sequences
of one request, or the beams of one search, are preempted together, and blocks that they share are copied once. Only
sequences that did not fit together before are preempted one by one.

A tenant that holds no more than its floor is not preempted for blocks of another tenant: those that it freed would be
kept for it. For a running slot it is.
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
    # Sequences preempted since the latest plan, and whether blocks of them were kept in the host pool.
    _preempted: list[tuple[Seq, bool]] = field(default_factory=list)

    def take_preempted(self) -> list[tuple[Seq, bool]]:
        """Sequences preempted since the last call; True where blocks of the sequence were kept in the host pool."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def block_for(self, sequence: Seq) -> int:
        """Allocates a block, preempting from the end of the order if needed; -1 if it preempted the sequence itself."""
        while sequence.state is SeqStatus.RUNNING:
            # A sequence that runs alone may take blocks below floors, as at admission: they may have risen meanwhile.
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
        """Preempts the last request behind this sequence's, sparing requests that were preempted often while there is
        another victim. Returns False if none is behind. With one tenant this never preempts the front of the order.
        """
        own, last = sequence.tenant, None
        for tenant in self._most_first(own):
            last = self._last_of(tenant, sequence if tenant == own else None)
            if last is not None or tenant == own:
                break
        if last is not None:
            self.preempt(last, apart=last.request.apart)
        return last is not None

    def _last_of(self, tenant: int, behind: Seq | None = None) -> Seq | None:
        """The last sequence of a tenant that may be preempted, after the sequence `behind` and not of its request, or
        None. Requests below the preemption limit come first.
        """
        last = None
        for other in reversed(self._running.order):
            if other.tenant != tenant:
                continue
            if behind is not None and (other.request is behind.request or other.key < behind.key):
                break
            if _may_be_preempted(other):
                if other.request.preemptions < self._tables.limits.preemption_limit:
                    return other
                last = last or other
        return last

    def _shares(self) -> dict[int, float]:
        """Dominant share of each tenant: its share of slots or of blocks, whichever is larger, divided by its weight
        (Ghodsi et al., NSDI 2011).
        """
        held: dict[int, list[int]] = {}
        for sequence in self._running.order:
            count = held.setdefault(sequence.tenant, [0, 0])
            count[0] += 1
            count[1] += len(sequence.block_table)
        return {tenant: self._share(tenant, *count) for tenant, count in held.items()}

    def _share(self, tenant: int, slots: int, blocks: int) -> float:
        most = max(slots / self._tables.limits.max_running, blocks / self._tables.pool.num_blocks)
        return most / self._waiting.served.weight(tenant)

    def _most_first(self, taker: int, *, for_blocks: bool = True) -> list[int]:
        """Tenants whose running sequences may be preempted for blocks of `taker`, or else for slots, largest share
        first.
        """
        if not self._waiting.served.several:
            return [taker]
        tenants, shares = self._tables.pool.tenants, self._shares()
        if for_blocks and tenants is not None:
            shares = {other: share for other, share in shares.items() if tenants.yields(other, taker)}
        return sorted(shares, key=shares.__getitem__, reverse=True)

    def make_room(self, group: list[Seq], slots: int, free_blocks: int) -> None:
        """Preempts requests of other tenants until enough slots and blocks are free for the group at the head of the
        queue, so that newcomers do not wait for long requests of others.

        A victim's tenant has a larger share than the group's tenant would have with the group, so two tenants never
        preempt each other in turns. It has also been served more; otherwise the victim would be admitted next.
        """
        tenant, limits, pool = group[0].tenant, self._tables.limits, self._tables.pool
        served = self._waiting.served
        blocks = sum(-(-sequence.num_tokens // pool.block_size) for sequence in group)
        own = [sequence for sequence in self._running.order if sequence.tenant == tenant]
        # Beams are admitted if one slot is free, but each of them takes one in the running order.
        share = self._share(tenant, len(own) + len(group), sum(len(each.block_table) for each in own) + blocks)
        free_blocks, most = free_blocks or blocks, limits.max_running - slots
        while (lacks_blocks := pool.num_free_for(tenant) < free_blocks) or len(self._running.order) > most:
            shares, last = self._shares(), None
            # First blocks, then slots: a slot alone would be freed for nothing. Blocks that the group will hit are not
            # known, so they count as lacking, too.
            for other in self._most_first(tenant, for_blocks=lacks_blocks):
                if served.place(other) > served.place(tenant) and shares[other] > share and last is None:
                    last = self._last_of(other)
            if last is None:
                return
            self.preempt(last, apart=last.request.apart)

    def _preempt_own(self, request: LiveRequest) -> None:
        """Preempts a request that needs a block while no request is behind it: it waits whole until those before it
        have made room. If it runs alone it has outgrown the pool: it goes on with one sequence less, as does a request
        whose sequences returned one by one.
        """
        candidates = [s for s in self._running.order if _may_be_preempted(s)]
        own = [sequence for sequence in candidates if sequence.request is request]
        if len(own) == len(candidates) and request.search is None:
            request.apart = True
        self.preempt(own[-1], apart=request.apart)

    def preempt(self, sequence: Seq, *, apart: bool = False) -> None:
        """Frees every block of the sequence's request, or of the sequence alone if `apart`. The sequences wait, and
        later continue from blocks that are still cached or swapped out. Tokens in flight still count, except those of
        beams, which are computed again.
        """
        group = [sequence] if apart else sequence.request.sequences
        self._give_back([s for s in group if s.state in HOLDING and _may_be_preempted(s)])

    def recompute(self, request: LiveRequest, void: Container[Seq]) -> None:
        """Preempts a request whose sequences `void` hold void content."""
        self._give_back([s for s in request.sequences if s.state in HOLDING and (s in void or _may_be_preempted(s))])

    def _give_back(self, group: list[Seq]) -> None:
        members = sorted(group, key=key)
        for member in reversed(members):
            self._tables.counters.preemptions += 1
            member.preemptions += 1
            member.candidates = None
            self._running.remove(member, SeqStatus.WAITING)
        # All of them together, before any frees its blocks, so that shared blocks are copied once.
        self._tables.swap_out(members)
        for member in reversed(members):
            self._tables.free(member)
            self._tables.counters.swap_preemptions += member.swapped is not None
            self._preempted.append((member, member.swapped is not None))
            self._waiting.push(member)

    def preempt_all(self) -> None:
        """Preempts every sequence except those whose last token is in flight."""
        for sequence in reversed(self._running.order[:]):
            if sequence.state is not SeqStatus.WAITING and _may_be_preempted(sequence):
                self.preempt(sequence)


def _may_be_preempted(sequence: Seq) -> bool:
    """False for a draining sequence, which frees its blocks very soon, unless it is a beam that may wait for others."""
    return sequence.state is SeqStatus.RUNNING or sequence.request.search is not None
