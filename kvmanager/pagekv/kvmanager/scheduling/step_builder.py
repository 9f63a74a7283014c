"""The step being planned: what it computes so far, and what is left of its token budget."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.decode_batch import Rows
from pagekv.kvmanager.scheduling.fairness.virtual_tokens import VirtualTokens
from pagekv.kvmanager.scheduling.queues import RunningQueue
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import NOBODY, NewSeq, StepPlan

# At most 1 / BESIDE_PARTS of a step's tokens is for prompts of other tenants than that of the step's first prompt.
BESIDE_PARTS = 4


class StepBuilder:
    """Fills one StepPlan. Decodes come first; everything else is added sequence by sequence."""

    def __init__(self, running: RunningQueue, tables: BlockTables, served: VirtualTokens) -> None:
        self.plan = StepPlan()
        self._served = served
        self._running = running
        self._tables = tables
        # Tokens left of the budget.
        self.room = tables.limits.max_batch_tokens
        # The tenant of the step's first prompt: the one that was served least.
        self._first: int | None = None
        # Whether this tenant is a newcomer whose prompt is not in the step yet.
        self._is_expected = False
        # Tokens left for prompts of other tenants.
        self._beside = -(-self.room // BESIDE_PARTS)
        self._decodes: Rows = NOBODY
        # Seq_ids of other sequences that sample.
        self._sampling: list[int] = []

    @property
    def num_at_executor(self) -> int:
        return len(self._running.batch.decoding_rows()) + len(self._running.prefilling) + len(self.plan.beams)

    def room_for(self, tenant: int) -> int:
        """Tokens left for prompts of a tenant: fewer if another tenant's prompt is first, to keep its step short."""
        return self.room if self._first is None or self._first == tenant else min(self.room, self._beside)

    def takes(self, sequence: Seq, count: int = 1, *, half: bool = False) -> bool:
        """Whether the bytes left in the step suffice for `count` such sequences; with `half`, so that half of a whole
        step's bytes stay free. One sequence may always enter an empty step.
        """
        room, left = self._tables.room, self._tables.room.left
        if count == 1 and left == room.whole:
            return True
        blocks = -(-sequence.num_tokens // self._tables.pool.block_size)
        # Every block may be copied in from the host pool, and its earlier content copied out.
        copies = 2 * blocks if self._tables.host.num_blocks else 0
        entering = count * (self._bytes_of(sequence, blocks) + self._tables.limits.id_bytes.copies(copies))
        return entering <= left - (room.whole // 2 if half else 0)

    def _bytes_of(self, sequence: Seq, num_blocks: int) -> int:
        sampling = sequence.request.command.sampling
        lists = bool(sampling.min_tokens or sampling.logit_bias)
        return self._tables.limits.id_bytes.entry(sequence.num_tokens, num_blocks, lists=lists)

    def leave(self, tokens: int, *, newcomer: int | None) -> None:
        """Leaves no more than `tokens` tokens for prompts. If the first prompt is a newcomer's, it leaves nothing for
        other tenants: neither for their prompts nor for returning beams, which are planned before it.
        """
        self.room = min(self.room, tokens)
        self._beside = -(-self.room // BESIDE_PARTS) if newcomer is None else 0
        if newcomer is not None:
            self._first, self._is_expected = newcomer, True

    def give_up(self, tenant: int) -> None:
        """Notes that this tenant's prompt does not fit. If it was expected first, the next prompt takes its part."""
        if self._is_expected and self._first == tenant:
            self._first, self._is_expected = None, False

    def add_decodes(self, rows: Rows) -> Rows:
        """Adds one token for each of these ascending rows; returns the result of `DecodeBatch.promise`."""
        self._decodes = rows
        self.plan.num_decodes = len(rows)
        self.plan.num_tokens += len(rows)
        self.room -= len(rows)
        return self._running.batch.promise(rows)

    def add_passed_over(self, rows: Rows) -> None:
        """Adds decoding rows that compute nothing in this step. The budget keeps tokens for all of them."""
        self.plan.scheduled_seq_ids += rows.tolist()
        self.plan.scheduled_tokens += [0] * len(rows)
        self.room -= len(rows)

    def add_new(self, sequence: Seq) -> None:
        """Adds a member of the running order, which enters the executor with its first chunk."""
        self._running.enter(sequence)
        tokens, table = sequence.token_ids[:], sequence.block_table[:]
        self._tables.room.entering += self._bytes_of(sequence, len(table))
        self.plan.new.append(NewSeq(sequence, sequence.seq_id, tokens, table, sequence.num_computed))
        self.add_chunk(sequence, least=1)

    def add_chunk(self, sequence: Seq, *, least: int = 0) -> None:
        """Adds as many of the known tokens as there is room for; `least`: even if other tenants have used the room."""
        plan, seq_id = self.plan, sequence.seq_id
        remaining = sequence.num_tokens - sequence.num_computed
        chunk = min(remaining, self.room, max(least, self.room_for(sequence.tenant)))
        if chunk != 1:
            plan.scheduled_seq_ids.append(seq_id)
            plan.scheduled_tokens.append(chunk)
        if not chunk:
            return
        sequence.num_computed += chunk
        if self._served.several:
            self._charge(sequence, chunk)
            self._count(sequence.tenant, chunk)
        plan.num_tokens += chunk
        self.room -= chunk
        if chunk == remaining:
            self._sampling.append(seq_id)
            self._running.end_prefill(sequence)
            if sequence.request.search is not None:
                plan.beams[seq_id] = sequence
        # Steps run in order and a layer writes the whole step's keys and values before it attends, so the blocks of
        # this chunk can be hit by the very next admission, even within this step.
        self._tables.publisher.publish(sequence, computed_now=True)

    def _charge(self, sequence: Seq, chunk: int) -> None:
        """Charges the tenant for the chunk's prompt tokens that were not charged before."""
        end = min(sequence.num_computed, len(sequence.request.command.prompt_ids))
        start = max(sequence.num_computed - chunk, sequence.num_charged)
        if start < end:
            self._served.charge_prompt(sequence.tenant, end - start)
            sequence.num_charged = end

    def _count(self, tenant: int, chunk: int) -> None:
        if self._first is None:
            self._first = tenant
        if tenant == self._first:
            self._is_expected = False
        else:
            self._beside = max(0, self._beside - chunk)

    def finish(self) -> StepPlan | None:
        """The plan; None when there is nothing to do."""
        plan = self.plan
        plan.finished = self._running.take_finished(plan.beams)
        plan.copies = self._tables.take_copies()
        plan.sampling = self._decodes
        if self._sampling:
            plan.prefilled = self._sampling
            plan.sampling = np.sort(np.concatenate([self._decodes, np.array(self._sampling, np.intp)]))
        return plan if plan.num_tokens or plan.finished or plan.copies else None
