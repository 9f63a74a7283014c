"""Who computes what in the next step: continuous batching with chunked prefill under a token budget (DESIGN 5).

A step is planned from what will be true once the steps in flight are done: every sampled token they promise is
counted (`num_pending`) though its value is unknown, so step N + 1 can be planned while step N runs. When a promised
token turns out to end a sequence, the step in flight has computed one token too many for it, which is dropped.

Order within a step: decodes first, in order of (priority, arrival); then prefills under way; then admissions from the
waiting queue while budget, sequence slots and blocks last. Only decodes need blocks beyond those taken at admission,
so only they can preempt, and their victim, the last of the running order, is never planned already.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from pagekv.kvmanager.block_hash import chain_digests, token_bytes
from pagekv.kvmanager.block_pool import BlockPool, InvariantError
from pagekv.kvmanager.request import FinishReason, SequenceDelta
from pagekv.kvmanager.sequence import LiveRequest, Sequence, SequenceState
from pagekv.kvmanager.step_plan import NewSequence, StepOutcome, StepPlan
from pagekv.kvmanager.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of admission."""

    # Tokens computed in one step at most.
    max_batch_tokens: int
    # Sequences in the executor at most.
    max_running: int
    # Share of the pool that admission leaves free, so that running decodes can grow.
    watermark: float
    prefix_cache: bool


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative since the manager started; names as in GetStatsResponse."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns the queues and, through `pool`, every block. Single-threaded; `schedule` and `commit` alternate freely."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, eos_token_ids: Iterable[int]) -> None:
        self.pool = pool
        self.limits = limits
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        # Sorted by key; RUNNING and DRAINING.
        self.running: list[Sequence] = []
        self._eos = frozenset(eos_token_ids)
        self._block_size = pool.block_size
        # Handles that the executor still holds and the next step must drop.
        self._leaving: list[int] = []
        self._next_handle = 1

    # -- entering

    def add(self, request: LiveRequest) -> None:
        """Queues every sequence of a request."""
        for sequence in request.sequences:
            self.waiting.push(sequence)

    # -- planning

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None when there is nothing to do now."""
        plan = StepPlan(finished=self._leaving)
        budget = self.limits.max_batch_tokens
        budget -= self._plan_decodes(plan, budget)
        budget -= self._plan_prefills(plan, budget)
        self._plan_admissions(plan, budget)
        if not plan.num_tokens and not plan.finished:
            return None
        self._leaving = []
        return plan

    def _plan_decodes(self, plan: StepPlan, budget: int) -> int:
        """One token for every sequence whose last token is known or promised; returns tokens planned."""
        planned = 0
        block_size = self._block_size
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            position += 1
            if sequence.state is SequenceState.DRAINING or sequence.num_total - sequence.num_computed != 1:
                continue
            if sequence.num_computed + 1 > sequence.max_total - 1:
                # The last token it may have is promised already: leave the executor, keep the blocks until it is here.
                sequence.state = SequenceState.DRAINING
                plan.finished.append(sequence.handle)
                continue
            if planned == budget:
                self._sit_out(plan, sequence)
                continue
            if sequence.num_computed == len(sequence.block_table) * block_size:
                block = self._block_for(sequence)
                if block is None:
                    continue
                sequence.block_table.append(block)
                plan.append_handles.append(sequence.handle)
                plan.append_blocks.append(block)
            sequence.num_computed += 1
            sequence.num_pending += 1
            plan.sampling[sequence.handle] = sequence
            planned += 1
        plan.num_tokens += planned
        return planned

    def _plan_prefills(self, plan: StepPlan, budget: int) -> int:
        """The next chunk of every admitted sequence with more than one known token to compute."""
        planned = 0
        for sequence in self.running:
            remaining = sequence.num_total - sequence.num_computed
            if sequence.state is SequenceState.DRAINING or remaining <= 1:
                continue
            chunk = min(remaining, budget - planned)
            if chunk == 0:
                self._sit_out(plan, sequence)
                continue
            planned += chunk
            self._plan_chunk(plan, sequence, chunk)
        return planned

    def _plan_admissions(self, plan: StepPlan, budget: int) -> None:
        """Admits waiting sequences in order; the first that does not fit blocks those behind it (no starvation)."""
        while budget > 0 and len(self.running) < self.limits.max_running:
            sequence = self.waiting.head()
            # A preempted sequence is recomputed from its tokens, so those still promised must arrive first.
            if sequence is None or sequence.num_pending or not self._take_blocks(sequence):
                return
            self.waiting.pop()
            sequence.state = SequenceState.RUNNING
            sequence.handle = self._next_handle
            self._next_handle += 1
            insort(self.running, sequence, key=lambda other: other.key)
            plan.new.append(
                NewSequence(
                    sequence,
                    sequence.handle,
                    list(sequence.token_ids),
                    list(sequence.block_table),
                    sequence.num_computed,
                )
            )
            chunk = min(len(sequence.token_ids) - sequence.num_computed, budget)
            budget -= chunk
            self._plan_chunk(plan, sequence, chunk)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, chunk: int) -> None:
        if chunk != 1:
            plan.scheduled_handles.append(sequence.handle)
            plan.scheduled_tokens.append(chunk)
        sequence.num_computed += chunk
        plan.num_tokens += chunk
        if sequence.num_computed == len(sequence.token_ids):
            sequence.num_pending += 1
            plan.sampling[sequence.handle] = sequence
        # Steps run in order and a layer writes the whole step's keys and values before it attends, so the blocks of
        # this chunk can be hit by the very next admission, even within this step.
        self._publish(sequence)

    @staticmethod
    def _sit_out(plan: StepPlan, sequence: Sequence) -> None:
        plan.scheduled_handles.append(sequence.handle)
        plan.scheduled_tokens.append(0)

    # -- blocks

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Touches the cached prefix and allocates blocks for every other known token; False, and nothing taken, when
        they would not leave the watermark free."""
        hits: list[int] = []
        if self.limits.prefix_cache and sequence.request.command.identity.read:
            self._extend_digests(sequence)
            # At least one token is computed, or there would be no logits to sample from.
            reusable = (len(sequence.token_ids) - 1) // self._block_size
            hits = self.pool.match(sequence.digests, token_bytes(sequence.token_ids), reusable)
        needed = -(-len(sequence.token_ids) // self._block_size) - len(hits)
        free_after = self.pool.num_free - needed - sum(1 for block in hits if self.pool.ref_count(block) == 0)
        # With nothing running the watermark protects nobody, and insisting on it could block a large prompt for ever.
        watermark = math.ceil(self.limits.watermark * self.pool.num_blocks) if self.running else 0
        if free_after < watermark:
            return False
        self.pool.touch(hits)
        fresh = self.pool.allocate(needed)
        if fresh is None:
            raise InvariantError(f"{needed} blocks were free and could not be allocated")
        sequence.block_table = hits + fresh
        sequence.num_published = len(hits)
        sequence.num_computed = len(hits) * self._block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.cached_tokens
        return True

    def _block_for(self, sequence: Sequence) -> int | None:
        """One block for a decode, preempting from the end of the running order; None when that reached the sequence
        itself, which then waits."""
        while (blocks := self.pool.allocate(1)) is None:
            # Lowest priority, latest arrival. A draining sequence gives its blocks back by itself very soon.
            victim = next(s for s in reversed(self.running) if s.state is SequenceState.RUNNING)
            self._preempt(victim)
            if victim is sequence:
                return None
        return blocks[0]

    def _preempt(self, sequence: Sequence) -> None:
        """Frees every block; the sequence waits and is recomputed from its tokens. Tokens in flight still count."""
        self.counters.preemptions += 1
        sequence.preemptions += 1
        self._leaving.append(sequence.handle)
        self._release(sequence, SequenceState.WAITING)
        self.waiting.push(sequence)

    def _release(self, sequence: Sequence, state: SequenceState) -> None:
        """The one way out of the running order: blocks back to the pool, last block first."""
        self.running.remove(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_published = 0
        sequence.num_computed = 0
        sequence.state = state

    def _extend_digests(self, sequence: Sequence) -> None:
        """Brings `digests` up to the full blocks of the known tokens."""
        full = len(sequence.token_ids) // self._block_size
        done = len(sequence.digests)
        if done < full:
            parent = sequence.digests[-1] if done else sequence.request.root
            new = token_bytes(sequence.token_ids[done * self._block_size : full * self._block_size])
            media = sequence.request.command.identity.media
            sequence.digests += chain_digests(parent, new, self._block_size, media, done)

    def _publish(self, sequence: Sequence) -> None:
        """Offers to the prefix table every block that is full, known and planned to be written."""
        size = self._block_size
        full = min(len(sequence.token_ids), sequence.num_computed) // size
        if full <= sequence.num_published:
            return
        if self.limits.prefix_cache and sequence.request.command.identity.write:
            self._extend_digests(sequence)
            for index in range(sequence.num_published, full):
                parent = sequence.digests[index - 1] if index else sequence.request.root
                tokens = token_bytes(sequence.token_ids[index * size : (index + 1) * size])
                self.pool.publish(sequence.block_table[index], sequence.digests[index], parent, tokens)
        sequence.num_published = full

    # -- results

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Takes in a step's tokens, pushes them to their streams and finishes sequences that ended.

        Raises InvariantError when the outcome does not answer the plan.
        """
        if len(outcome.sampled_handles) != len(outcome.sampled_tokens):
            raise InvariantError(
                f"step {outcome.step} sampled {len(outcome.sampled_tokens)} tokens for "
                f"{len(outcome.sampled_handles)} sequences"
            )
        tokens = dict(zip(outcome.sampled_handles, outcome.sampled_tokens, strict=True))
        if tokens.keys() != plan.sampling.keys():
            odd = sorted(tokens.keys() ^ plan.sampling.keys())[:8]
            raise InvariantError(f"step {outcome.step} sampled other sequences than planned, such as {odd}")
        for handle, sequence in plan.sampling.items():
            if sequence.state is SequenceState.FINISHED:
                continue  # the one token too many
            sequence.num_pending -= 1
            self._append(sequence, tokens[handle], outcome)

    def _append(self, sequence: Sequence, token: int, outcome: StepOutcome) -> None:
        sequence.token_ids.append(token)
        self.counters.generated_tokens += 1
        delta = SequenceDelta(
            sequence.index, [token], cached_tokens=sequence.cached_tokens or 0, preemptions=sequence.preemptions
        )
        logprobs = outcome.logprobs.get(sequence.handle)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        sampling = sequence.request.command.sampling
        ends = token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos)
        if ends and sequence.num_output >= sampling.min_tokens:
            delta.finish, delta.stop_token_id = FinishReason.STOP, token
        elif len(sequence.token_ids) >= sequence.max_total:
            delta.finish = FinishReason.LENGTH
        if sequence.block_table:
            self._publish(sequence)
        if delta.finish is not None:
            self.finish(sequence)
        sequence.request.stream.push(delta)

    # -- leaving

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state; its blocks are free for the very next step. Idempotent."""
        if sequence.state is SequenceState.WAITING:
            sequence.state = SequenceState.FINISHED
            self.waiting.forget()
        elif sequence.state is not SequenceState.FINISHED:
            if sequence.state is SequenceState.RUNNING:
                self._leaving.append(sequence.handle)
            self._release(sequence, SequenceState.FINISHED)

    def lose_executor(
        self, lost: Iterable[StepPlan], pool: BlockPool, limits: SchedulerLimits, eos_token_ids: Iterable[int]
    ) -> None:
        """A new epoch with empty pools: everything running waits again and is recomputed from its tokens.

        `lost` are the steps in flight; the tokens they promised never come and will be sampled again, the same ones.
        """
        for plan in lost:
            for sequence in plan.sampling.values():
                sequence.num_pending = 0
        for sequence in list(self.running):
            self._release(sequence, SequenceState.WAITING)
            self.waiting.push(sequence)
        self._leaving = []
        self._next_handle = 1
        pool.evictions += self.pool.evictions
        pool.hash_alarms += self.pool.hash_alarms
        self.pool = pool
        self.limits = limits
        self._eos = frozenset(eos_token_ids)

    # -- proof

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Recomputes block counts and queue lengths from the live sequences; raises InvariantError."""
        sequences = list(live)
        held = [s for s in sequences if s.state in (SequenceState.RUNNING, SequenceState.DRAINING)]
        self.pool.check_integrity([s.block_table for s in held])
        if sorted(held, key=lambda s: s.key) != self.running:
            raise InvariantError(f"{len(held)} sequences hold blocks, the running order has {len(self.running)}")
        waiting = sum(1 for s in sequences if s.state is SequenceState.WAITING)
        if waiting != len(self.waiting):
            raise InvariantError(f"{waiting} sequences wait, the waiting queue counts {len(self.waiting)}")
        for s in held:
            covered = -(-max(len(s.token_ids), s.num_computed) // self._block_size)
            if not s.num_computed <= s.num_total <= s.max_total or covered not in (
                len(s.block_table),
                len(s.block_table) + 1,
            ):
                raise InvariantError(
                    f"sequence {s.key}: {s.num_computed} computed of {s.num_total} (at most {s.max_total}) in "
                    f"{len(s.block_table)} blocks of {self._block_size}"
                )
