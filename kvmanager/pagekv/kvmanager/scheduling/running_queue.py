"""The running order: sequences that hold blocks, how they enter it and the one way out of it.

Blocks come with a place in the order and go back when it is left, by finish, by preemption or with the executor. The
sequences of one request, or the beams of one search, are preempted together, and what they share is copied once. Only
those that have not fitted together before are preempted one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagekv.common.flags import flag, flag_metadata, integer, number
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_SEQ_ID, LiveRequest, Seq, SeqStatus
from pagekv.kvmanager.scheduling.shared_prefill import SharedPrefill
from pagekv.kvmanager.scheduling.step_plan import NewSeq, StepPlan
from pagekv.kvmanager.scheduling.swapping import MODES, SwapCounters, SwapPolicy
from pagekv.kvmanager.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of admission."""

    max_batch_tokens: int = flag(
        "tokens computed in one step at most", default=2048, type=integer(1, 65536), metavar="TOKENS"
    )
    max_running: int = flag(
        "sequences that take part in steps at most", default=256, type=integer(1, 65536), metavar="N"
    )
    watermark: float = flag(
        "share of the pool, 0 to 0.5, that new requests leave free for running ones to grow",
        default=0.01,
        type=number(0, 0.5),
        metavar="SHARE",
    )
    prefix_cache: bool = flag("reuse the blocks of equal prompt prefixes", default=True)
    partial_hits: bool = flag(
        "also reuse the beginning of a cached block, by copying it (with --prefix-cache)", default=True
    )
    fork_sharing: bool = flag(
        "the sequences of one request (n, beam_width) share blocks, whatever --prefix-cache says of other requests",
        default=True,
    )
    swap: SwapPolicy = field(
        default_factory=SwapPolicy,
        metadata=flag_metadata(
            "what becomes of the blocks of preempted sequences; swap: copied to the host pool; recompute: dropped and "
            "computed again; auto: what costs less by the executor's measurements",
            name="preemption",
            default="auto",
            make=SwapPolicy,
            choices=MODES,
        ),
    )
    write_back: bool = flag(
        "blocks that the device evicts go to the host pool and serve later hits from there (with --prefix-cache)",
        default=False,
    )
    # Preemptions after which a request is passed over as a victim, as long as another one can be found: few enough that
    # no request is starved by the others, enough that the last one to come, which has computed least, is taken first.
    preemption_limit: int = 3

    @property
    def uses_host(self) -> bool:
        """Whether anything can come to be kept in the host pool."""
        return self.write_back or self.swap.mode != "recompute"


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative since the manager started; names as in GetStatsResponse."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    # Of the preemptions, those after which something was kept in the host pool.
    swap_preemptions: int = 0
    swaps: SwapCounters = field(default_factory=SwapCounters)


class RunningQueue:
    """Of one epoch: a new one begins with empty pools. What waits and what is counted goes on."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        counters: SchedulerCounters,
    ) -> None:
        self.pool = pool
        self.host = host
        self.limits = limits
        self.tables = BlockTables(
            pool,
            host,
            counters.swaps,
            prefix_cache=limits.prefix_cache,
            partial_hits=limits.partial_hits,
            fork_sharing=limits.fork_sharing,
            write_back=limits.write_back,
        )
        self.rows = DecodeBatch(pool.block_size)
        self.waiting = waiting
        self.counters = counters
        # Sorted by key; RUNNING and DRAINING.
        self.order: list[Seq] = []
        # Of those, the ones with known tokens left to plan; sorted by key.
        self.prefilling: list[Seq] = []
        # Those that hold blocks, or beams that will get one, and are to enter the executor; sorted by key.
        self.returning: list[Seq] = []
        # Of those, the ones that share blocks which are yet to be computed.
        self.followers = SharedPrefill(pool.block_size)
        # Handles that the executor still holds and the next step must drop.
        self.leaving: list[int] = []
        # Preempted since the latest plan, and whether something was kept in the host pool.
        self.preempted: list[tuple[Seq, bool]] = []
        # Sequences in the state FORKING.
        self.num_forking = 0

    def is_alone(self, request: LiveRequest) -> bool:
        """Whether no other request holds blocks."""
        return not self.order or self.order[0].request is request is self.order[-1].request

    def watermark(self, request: LiveRequest) -> int:
        """Blocks that an admission of this request leaves free."""
        # With no other running it protects nobody, and insisting on it could block a large prompt for ever.
        return 0 if self.is_alone(request) else math.ceil(self.limits.watermark * self.pool.num_blocks)

    # -- in

    def hold(self, sequence: Seq) -> None:
        """A sequence that has its blocks takes its place."""
        sequence.state = SeqStatus.RUNNING
        insort(self.order, sequence, key=key)

    def enter(self, plan: StepPlan, sequence: Seq, budget: int, sampling: list[int]) -> None:
        """Makes a sequence of the order known to the executor, and plans its first chunk."""
        self.rows.open(sequence)
        insort(self.prefilling, sequence, key=key)
        tokens, table = sequence.token_ids[:], sequence.block_table[:]
        plan.new.append(NewSeq(sequence, sequence.seq_id, tokens, table, sequence.num_computed))
        self.plan_chunk(plan, sequence, budget, sampling)

    def plan_chunk(self, plan: StepPlan, sequence: Seq, budget: int, sampling: list[int]) -> None:
        """As many of the known tokens as the budget has left."""
        remaining = len(sequence.token_ids) - sequence.num_computed
        chunk = min(remaining, budget - plan.num_tokens)
        if chunk != 1:
            plan.scheduled_seq_ids.append(sequence.seq_id)
            plan.scheduled_tokens.append(chunk)
        if not chunk:
            return
        sequence.num_computed += chunk
        plan.num_tokens += chunk
        if chunk == remaining:
            del self.prefilling[bisect_left(self.prefilling, sequence.key, key=key)]
            sampling.append(sequence.seq_id)
            if sequence.request.search is None:
                self.rows.start_decoding(sequence)
            else:
                # What follows is not the token that it samples: it leaves after this step and waits for the decision.
                sequence.state = SeqStatus.DRAINING
                self.rows.expect_candidates(sequence)
                plan.beams[sequence.seq_id] = sequence
        # Steps run in order and a layer writes the whole step's keys and values before it attends, so the blocks of
        # this chunk can be hit by the very next admission, even within this step.
        self.tables.publish(sequence, computed_now=True)

    def block_for(self, sequence: Seq) -> int:
        """One block for a sequence, preempting from the end of the order; -1 when that reached the sequence itself,
        which then waits.
        """
        while sequence.state is SeqStatus.RUNNING:
            blocks = self.tables.allocate(1)
            if blocks is not None:
                return int(blocks[0])
            if not self.preempt_behind(sequence):
                self._preempt_own(sequence.request)
        return -1

    def preempt_behind(self, sequence: Seq) -> bool:
        """Preempts a request that stands behind this sequence's: the last, but for those that were preempted often
        enough while there is another. False when nobody is behind. The front of the order is never preempted so.
        """
        last = None
        for other in reversed(self.order):
            if other.request is sequence.request or other.key < sequence.key:
                break
            if _may_be_preempted(other):
                if other.request.preemptions < self.limits.preemption_limit:
                    last = other
                    break
                last = last or other
        if last is not None:
            self.preempt(last, apart=last.request.apart)
        return last is not None

    def _preempt_own(self, request: LiveRequest) -> None:
        """Nobody is behind a request that needs a block. It waits whole until those before it have made room; but
        where it is the first it has outgrown the pool, and goes on with one sequence less, as one does that came back
        one by one.
        """
        candidates = [s for s in self.order if _may_be_preempted(s)]
        if candidates[0].request is request and request.search is None:
            request.apart = True
        self.preempt(candidates[-1], apart=request.apart)

    # -- out

    def queue(self, sequences: Iterable[Seq]) -> None:
        """Makes sequences that hold nothing wait for admission."""
        for sequence in sequences:
            self.num_forking -= sequence.state is SeqStatus.FORKING
            sequence.state = SeqStatus.WAITING
            self.waiting.push(sequence)

    def preempt(self, sequence: Seq, *, apart: bool = False) -> None:
        """Frees every block of a request, or of the one sequence `apart`; its sequences wait, and go on from what they
        find cached or swapped out. Tokens in flight still count, unless they are beams: those compute them again.
        """
        group = [sequence] if apart else sequence.request.sequences
        members = sorted((s for s in group if s.state in HOLDING and _may_be_preempted(s)), key=key)
        for member in reversed(members):
            self.counters.preemptions += 1
            member.preemptions += 1
            member.candidates = None
            self._leave(member, SeqStatus.WAITING)
        # Of what they share, one copy, before any of them gives it back.
        self.tables.swap_out(members, self.limits.swap)
        for member in reversed(members):
            self.tables.free(member)
            self.counters.swap_preemptions += member.swapped is not None
            self.preempted.append((member, member.swapped is not None))
            self.waiting.push(member)

    def preempt_all(self) -> None:
        """Preempts every sequence but those whose last token is in flight."""
        for sequence in reversed(self.order[:]):
            if sequence.state is not SeqStatus.WAITING and _may_be_preempted(sequence):
                self.preempt(sequence)

    def release(self, sequence: Seq) -> None:
        """A sequence ends: its blocks go back to the pool, last block first."""
        self._leave(sequence, SeqStatus.FINISHED)
        self.tables.free(sequence)

    def _leave(self, sequence: Seq, state: SeqStatus) -> None:
        """The one way out of the order."""
        self.followers.hand_over(sequence)
        at_executor = sequence.state is SeqStatus.RUNNING and sequence.seq_id != NO_SEQ_ID
        del self.order[bisect_left(self.order, sequence.key, key=key)]
        for others in (self.prefilling, self.returning):
            if sequence in others:
                others.remove(sequence)
        sequence.state = state
        if at_executor:
            self.leaving.append(sequence.seq_id)
        if sequence.seq_id != NO_SEQ_ID:
            self.rows.leave(sequence, finished=state is SeqStatus.FINISHED)

    def lose(self) -> None:
        """The executor is gone with every block: what ran waits and is recomputed from its tokens."""
        self.rows.clear()
        for sequence in self.order:
            self.tables.forget(sequence)
            sequence.candidates = None
        self.queue(self.order)


def _may_be_preempted(sequence: Seq) -> bool:
    """Of the order: what is draining gives its blocks back by itself very soon, unless it is a beam, which may have to
    wait for others."""
    return sequence.state is SeqStatus.RUNNING or sequence.request.search is not None


def key(sequence: Seq) -> tuple[int, int, int]:
    """Smaller runs first and is preempted last."""
    return sequence.key
