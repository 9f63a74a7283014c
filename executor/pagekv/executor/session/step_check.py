"""Checks every rule of a step against the live state before any state or memory is touched.

A manager is not trusted with the executor's memory: a step that names a wrong id, length, slot or epoch is refused
whole, with the proto path of the field, its bounds, and the rule's number in executor_service.proto. The cost is
proportional to the step's changes and to the block tables that it brings or is the first to append to, plus a few
comparisons for each live sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.backend.interface import BackendFeature, BlockCopies, CopyDirection, Scheduled, SequenceState
from pagekv.executor.session.field_checks import (
    check_columns,
    check_distinct,
    check_features,
    check_ids,
    check_sampling,
    check_size,
)
from pagekv.executor.session.step import NO_SAMPLING, Step
from pagekv.executor.session.written_slots import WrittenSlots

# The most tokens that one step may compute, even if more were profiled.
MAX_STEP_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """The bounds of ids and lengths in an epoch, and the features that its steps may use."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    max_sequences: int
    max_logprobs: int
    features: frozenset[BackendFeature]

    @property
    def max_blocks(self) -> int:
        """The number of blocks in the longest block table."""
        return -(-self.max_model_len // self.block_size)


def check_step(
    step: Step,
    epoch: int,
    next_step: int,
    live: Mapping[int, SequenceState],
    limits: EpochLimits,
    written: WrittenSlots,
) -> CheckedStep:
    """Checks a step against the live sequences, which are in the order in which they entered, and the written slots.
    Changes nothing. Raises StaleEpoch or InvalidRequest.
    """
    if step.epoch != epoch:
        raise StaleEpoch(f"epoch: {step.epoch} is over: attach again (P6)")
    if step.step != next_step:
        raise InvalidRequest("step", f"must be {next_step}, one more than the step before, got {step.step}", "R1")
    return CheckedStep(step, live, limits, written)


class CheckedStep:
    """A step that has passed all checks, and the state that follows from it. The constructor raises
    InvalidRequest.
    """

    def __init__(
        self, step: Step, live: Mapping[int, SequenceState], limits: EpochLimits, written: WrittenSlots
    ) -> None:
        self._step, self._limits, self._written = step, limits, written
        # The written slots as the copies leave them.
        self.copied = written.copied()
        # For each block that tokens are computed in: one past the last slot that is written.
        self.ends: dict[int, int] = {}
        # The sequences that are live after the step, by seq_id, in the order in which they entered.
        self.live = dict(live)
        for index, seq_id in enumerate(step.finished_seqs):
            if seq_id not in live:
                raise InvalidRequest(f"finished_seqs[{index}]", f"must be a live sequence, got {seq_id}", "R2")
            if self.live.pop(seq_id, None) is None:
                raise InvalidRequest(f"finished_seqs[{index}]", f"names sequence {seq_id} twice", "R3")
        for index, copies in enumerate(step.memory_ops):
            self._check_copies(f"memory_ops[{index}]", copies)
        for index, state in enumerate(step.new_seqs):
            self._check_new(f"new_seqs[{index}]", state)
            self.live[state.seq_id] = state
        if len(self.live) > limits.max_sequences:
            raise InvalidRequest(
                "new_seqs",
                f"must leave at most {limits.max_sequences} live sequences, would leave {len(self.live)}",
                "R20",
            )
        appended, counts = self._appended(), self._counts()
        # The tokens of all sequences; and the share of each sequence that computes any, in the order of `live`.
        self.num_tokens = 0
        self.scheduled = self._schedule(appended, counts)
        for index, state in enumerate(step.new_seqs):
            if state.computed_tokens:
                self._check_computed(f"new_seqs[{index}].computed_tokens", state, counts.get(state.seq_id, 1) > 0)

    def _check_copies(self, path: str, op: BlockCopies) -> None:
        device, host = self._limits.num_device_blocks, self._limits.num_host_blocks
        if op.direction is None:
            raise InvalidRequest(f"{path}.kind", "must be COPY, SWAP_OUT or SWAP_IN", "R4")
        if op.direction is not CopyDirection.COPY and not host:
            raise InvalidRequest(f"{path}.kind", f"must be COPY: there is no host pool for {op.direction.value}", "R5")
        check_columns(f"{path}.destinations", op.destinations, "sources", op.sources, "R6")
        pool_size = host if op.direction is CopyDirection.SWAP_IN else device
        check_ids(f"{path}.sources", op.sources, "block", pool_size, "R7")
        pool_size = host if op.direction is CopyDirection.SWAP_OUT else device
        check_ids(f"{path}.destinations", op.destinations, "block", pool_size, "R7")
        check_distinct(f"{path}.destinations", op.destinations, "R8")
        if op.direction is CopyDirection.COPY:
            # All pairs of one operation may be copied at once, so a chain of copies within it has no defined result.
            sources = set(op.sources)
            for index, block in enumerate(op.destinations):
                if block in sources:
                    raise InvalidRequest(
                        f"{path}.destinations[{index}]",
                        f"must not be a source of the same operation, got block {block}",
                        "R9",
                    )
        if (index := self.copied.add(op)) >= 0:
            raise InvalidRequest(
                f"{path}.sources[{index}]",
                f"must be a block that was written in this epoch, got block {op.sources[index]}",
                "R36",
            )

    def _check_new(self, path: str, new: SequenceState) -> None:
        tokens, table, limits = new.token_ids, new.block_table, self._limits
        if new.seq_id in self.live:
            raise InvalidRequest(f"{path}.seq_id", f"must not be in use by a live sequence, got {new.seq_id}", "R10")
        if not 1 <= len(tokens) <= limits.max_model_len:
            raise InvalidRequest(
                f"{path}.token_ids", f"must have from 1 to {limits.max_model_len} entries, has {len(tokens)}", "R11"
            )
        check_ids(f"{path}.token_ids", tokens, "token", limits.vocab_size, "R12")
        if not 1 <= new.num_prompt_tokens <= len(tokens):
            raise InvalidRequest(
                f"{path}.num_prompt_tokens",
                f"must be from 1 to the number of token_ids ({len(tokens)}), got {new.num_prompt_tokens}",
                "R13",
            )
        check_size(f"{path}.block_ids", table, limits.max_blocks, "R14")
        check_ids(f"{path}.block_ids", table, "block", limits.num_device_blocks, "R15")
        check_distinct(f"{path}.block_ids", table, "R16")
        most = min(len(tokens) - 1, len(table) * limits.block_size)
        if new.computed_tokens > most:
            raise InvalidRequest(
                f"{path}.computed_tokens",
                f"must be from 0 to {most} (below {len(tokens)} tokens, within {len(table)} blocks of "
                f"{limits.block_size}), got {new.computed_tokens}",
                "R17",
            )
        if new.sampling is NO_SAMPLING:
            raise InvalidRequest(f"{path}.sampling", "must be set", "R18")
        check_sampling(f"{path}.sampling", new.sampling, limits.vocab_size, limits.max_model_len, limits.max_logprobs)
        check_features(f"{path}.sampling", new.sampling, limits.features)

    def _appended(self) -> dict[int, dict[int, None]]:
        """By seq_id: the blocks that the step appends to its table, in their order."""
        seqs, blocks, most = self._step.append_seqs, self._step.append_blocks, self._limits.max_blocks
        check_columns("append_blocks", blocks, "append_seqs", seqs, "R21")
        check_ids("append_blocks", blocks, "block", self._limits.num_device_blocks, "R22")
        appended: dict[int, dict[int, None]] = {}
        for index, (seq_id, block) in enumerate(zip(seqs, blocks, strict=True)):
            path, state = f"append_blocks[{index}]", self._state(f"append_seqs[{index}]", seq_id, "R23")
            if state.blocks is None:
                # Built once, because searching a long table takes as long as copying it.
                state.blocks = set(state.block_table)
            new = appended.setdefault(seq_id, {})
            if block in state.blocks or block in new:
                raise InvalidRequest(path, f"block {block} is in the table of sequence {seq_id} already", "R24")
            new[block] = None
            if len(state.block_table) + len(new) > most:
                raise InvalidRequest(path, f"the table of sequence {seq_id} must have at most {most} blocks", "R25")
        return appended

    def _state(self, path: str, seq_id: int, rule: str) -> SequenceState:
        """The state of a sequence that is live in this step."""
        if seq_id not in self.live:
            raise InvalidRequest(path, f"must be a live sequence, got {seq_id}", rule)
        return self.live[seq_id]

    def _counts(self) -> dict[int, int]:
        """The number of tokens to compute, by seq_id, for the sequences that the step names."""
        seqs, tokens = self._step.scheduled_seqs, self._step.scheduled_tokens
        check_columns("scheduled_tokens", tokens, "scheduled_seqs", seqs, "R26")
        counts: dict[int, int] = {}
        for index, (seq_id, count) in enumerate(zip(seqs, tokens, strict=True)):
            state = self._state(f"scheduled_seqs[{index}]", seq_id, "R27")
            if seq_id in counts:
                raise InvalidRequest(f"scheduled_seqs[{index}]", f"names sequence {seq_id} twice", "R28")
            left = len(state.token_ids) - state.computed_tokens
            if count > left:
                raise InvalidRequest(
                    f"scheduled_tokens[{index}]",
                    f"must be from 0 to {left}, the tokens sequence {seq_id} has left to compute, got {count}",
                    "R29",
                )
            counts[seq_id] = count
        return counts

    def _schedule(self, appended: Mapping[int, Collection[int]], counts: Mapping[int, int]) -> list[Scheduled]:
        """Checks that every computed position has a slot that no other sequence writes."""
        block_size, max_len = self._limits.block_size, self._limits.max_model_len
        scheduled: list[Scheduled] = []
        ends, num_tokens = self.ends, 0
        for seq_id, state in self.live.items():
            start, count = state.computed_tokens, counts.get(seq_id, 1)
            if not count:
                continue
            first, end = start // block_size, start + count
            # The sequence's block table, without its first `left_out` entries.
            table, left_out = state.block_table, 0
            if seq_id in appended:
                table, left_out = [*table[first:], *appended[seq_id]], first
            num_blocks = left_out + len(table)
            if end > max_len:
                raise InvalidRequest(
                    self._tokens_path(seq_id),
                    f"sequence {seq_id} would compute position {end - 1}, the model holds {max_len} tokens",
                    "R31",
                )
            if end > num_blocks * block_size:
                raise InvalidRequest(
                    self._blocks_path(seq_id),
                    f"sequence {seq_id} would compute position {end - 1}, its {num_blocks} blocks of {block_size} "
                    f"hold positions below {num_blocks * block_size}",
                    "R30",
                )
            last = end - first * block_size
            if last <= block_size:  # one block, as for most sequences
                if (block := table[first - left_out]) in ends:
                    raise self._two_writers(block, seq_id, scheduled, appended)
                ends[block] = last
            else:
                for block in table[first - left_out : -(-end // block_size) - left_out]:
                    if block in ends:
                        raise self._two_writers(block, seq_id, scheduled, appended)
                    ends[block] = min(last, block_size)
                    last -= block_size
            num_tokens += count
            scheduled.append(Scheduled(state, start, count))
        if num_tokens > MAX_STEP_TOKENS:
            raise InvalidRequest(
                "scheduled_tokens", f"a step must compute at most {MAX_STEP_TOKENS} tokens, not {num_tokens}", "R33"
            )
        self.num_tokens = num_tokens
        return scheduled

    def _two_writers(
        self, block: int, seq_id: int, scheduled: Sequence[Scheduled], appended: Mapping[int, Collection[int]]
    ) -> InvalidRequest:
        """The refusal of a second sequence that writes to a block in this step."""
        size = self._limits.block_size
        other = 0
        for item in scheduled:
            other = item.state.seq_id
            table = [*item.state.block_table, *appended.get(other, ())]
            if block in table[item.start // size : -(-(item.start + item.count) // size)]:
                break
        return InvalidRequest(
            self._blocks_path(seq_id),
            f"block {block} would be written by sequences {other} and {seq_id} in one step",
            "R32",
        )

    def _check_computed(self, path: str, new: SequenceState, computes: bool) -> None:
        """Checks that the slots of a new sequence's computed tokens are written. This very step may write them, because
        every layer writes the keys and values of the whole step before it attends.
        """
        size, copied = self._limits.block_size, self.copied.on_device
        num_full, rest = divmod(new.computed_tokens, size)
        full = new.block_table[:num_full]
        if not self._written.are_full(full, size) or (copied and not copied.keys().isdisjoint(full)):
            for block in full:
                self._check_written(path, block, size, self.ends.get(block, 0))
        if rest:
            # If the sequence computes, it writes this block itself, after its computed tokens; only slots written
            # before count then.
            block = new.block_table[num_full]
            self._check_written(path, block, rest, 0 if computes else self.ends.get(block, 0))

    def _check_written(self, path: str, block: int, needed: int, now: int) -> None:
        """Checks that a block has `needed` written slots; `now`: how many this step writes."""
        written = max(self.copied.on_device.get(block, self._written.of(block)), now)
        if written < needed:
            raise InvalidRequest(
                path,
                f"must be tokens written in this epoch: they take {needed} slots of block {block}, of which {written} "
                "were written",
                "R37",
            )

    def _blocks_path(self, seq_id: int) -> str:
        """The path of the field that gives a sequence its blocks."""
        entered = [index for index, state in enumerate(self._step.new_seqs) if state.seq_id == seq_id]
        return f"new_seqs[{entered[0]}].block_ids" if entered else "append_blocks"

    def _tokens_path(self, seq_id: int) -> str:
        """The path of the field that says how many tokens a sequence computes."""
        seqs = self._step.scheduled_seqs
        return f"scheduled_tokens[{seqs.index(seq_id)}]" if seq_id in seqs else "scheduled_seqs"
