"""Every rule of a step, checked against the live state before any state or memory is touched.

A manager is not trusted with the executor's memory: a step that names a wrong id, length, slot or epoch is refused
whole, with the proto path of the field and its bounds. The cost is that of what the step changes, plus a few
comparisons per live sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Scheduled, SequenceState
from pagekv.executor.session.sampling_check import check_columns, check_sampling
from pagekv.executor.session.step import NO_SAMPLING, Step

# Tokens one step may compute at most, even where more were profiled.
MAX_STEP_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """Bounds of ids and lengths in an epoch."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    max_sequences: int

    @property
    def max_blocks(self) -> int:
        """Blocks in the longest table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(slots=True)
class CheckedStep:
    """A step that broke no rule, in the form it is applied in."""

    finished: list[int]
    copies: list[BlockCopies]
    new: list[SequenceState]
    # (seq_id, block), in order.
    appends: list[tuple[int, int]] = field(default_factory=list)
    # In the order the sequences entered the epoch; without those that compute no token.
    scheduled: list[Scheduled] = field(default_factory=list)
    num_tokens: int = 0


def check_step(
    step: Step,
    epoch: int,
    next_step: int,
    live: Mapping[int, SequenceState],
    held: Mapping[int, set[int]],
    limits: EpochLimits,
) -> CheckedStep:
    """The step in the form it is applied in. Raises StaleEpoch or InvalidRequest; changes nothing.

    `live` is by seq_id in the order of entering; `held` has the blocks of each live sequence's table.
    """
    if step.epoch != epoch:
        raise StaleEpoch(f"epoch: {step.epoch} is over, the epoch now is {epoch}: attach again")
    if step.step != next_step:
        raise InvalidRequest("step", f"must be {next_step}, one more than the step before, got {step.step}")
    return _Check(step, live, held, limits).run()


class _Check:
    """One pass over one step; a class only because the checks share what the step brings in."""

    def __init__(
        self, step: Step, live: Mapping[int, SequenceState], held: Mapping[int, set[int]], limits: EpochLimits
    ) -> None:
        self._step = step
        self._live = live
        self._held = held
        self._limits = limits
        self._finished: set[int] = set()
        # seq_id to (index in new_seqs, state).
        self._new: dict[int, tuple[int, SequenceState]] = {}
        # The blocks of the tables in `_new`, like `held` for live sequences.
        self._new_held: dict[int, set[int]] = {}
        # seq_id to the blocks this step appends, in order; a dictionary for fast membership tests.
        self._appended: dict[int, dict[int, None]] = {}

    def run(self) -> CheckedStep:
        checked = CheckedStep(self._step.finished_seqs, self._step.memory_ops, self._step.new_seqs)
        self._check_finished()
        for index, copies in enumerate(self._step.memory_ops):
            self._check_copies(f"memory_ops[{index}]", copies)
        for index, state in enumerate(self._step.new_seqs):
            self._check_new(index, state)
        staying = len(self._live) - len(self._finished) + len(checked.new)
        if staying > self._limits.max_sequences:
            raise InvalidRequest(
                "new_seqs", f"must leave at most {self._limits.max_sequences} live sequences, would leave {staying}"
            )
        checked.appends = self._check_appends()
        self._schedule(checked, self._counts())
        return checked

    def _check_finished(self) -> None:
        for index, seq_id in enumerate(self._step.finished_seqs):
            if seq_id not in self._live:
                raise InvalidRequest(f"finished_seqs[{index}]", f"must be a live sequence, got {seq_id}")
            if seq_id in self._finished:
                raise InvalidRequest(f"finished_seqs[{index}]", f"names sequence {seq_id} twice")
            self._finished.add(seq_id)

    # -- memory operations

    def _check_copies(self, path: str, op: BlockCopies) -> None:
        device, host = self._limits.num_device_blocks, self._limits.num_host_blocks
        if op.direction is None:
            raise InvalidRequest(f"{path}.kind", "must be COPY, SWAP_OUT or SWAP_IN")
        if op.direction is not CopyDirection.COPY and not host:
            raise InvalidRequest(f"{path}.kind", f"must be COPY: there is no host pool to {op.direction.value} with")
        check_columns(f"{path}.destinations", op.destinations, "sources", op.sources)
        _check_blocks(f"{path}.sources", op.sources, host if op.direction is CopyDirection.SWAP_IN else device)
        _check_blocks(
            f"{path}.destinations", op.destinations, host if op.direction is CopyDirection.SWAP_OUT else device
        )
        if (index := _first_repeated(op.destinations)) is not None:
            raise InvalidRequest(f"{path}.destinations[{index}]", f"names block {op.destinations[index]} twice")
        if op.direction is CopyDirection.COPY:
            # All pairs of one operation may be copied at once, so a chain inside it would have no defined result.
            sources = set(op.sources)
            for index, block in enumerate(op.destinations):
                if block in sources:
                    raise InvalidRequest(
                        f"{path}.destinations[{index}]",
                        f"must not be a source of the same operation, got block {block}",
                    )

    # -- entering sequences

    def _check_new(self, index: int, new: SequenceState) -> None:
        path, limits = f"new_seqs[{index}]", self._limits
        if new.seq_id in self._new or (new.seq_id in self._live and new.seq_id not in self._finished):
            raise InvalidRequest(f"{path}.seq_id", f"must not be in use by a live sequence, got {new.seq_id}")
        tokens, table = new.token_ids, new.block_table
        if not 1 <= len(tokens) <= limits.max_model_len:
            raise InvalidRequest(
                f"{path}.token_ids", f"must have from 1 to {limits.max_model_len} entries, has {len(tokens)}"
            )
        if max(tokens) >= limits.vocab_size:
            at = next(i for i, token in enumerate(tokens) if token >= limits.vocab_size)
            raise InvalidRequest(
                f"{path}.token_ids[{at}]", f"must be a token id below {limits.vocab_size}, got {tokens[at]}"
            )
        if not 1 <= new.num_prompt_tokens <= len(tokens):
            raise InvalidRequest(
                f"{path}.num_prompt_tokens",
                f"must be from 1 to the number of token_ids ({len(tokens)}), got {new.num_prompt_tokens}",
            )
        if len(table) > limits.max_blocks:
            raise InvalidRequest(
                f"{path}.block_ids", f"must have at most {limits.max_blocks} entries, has {len(table)}"
            )
        _check_blocks(f"{path}.block_ids", table, limits.num_device_blocks)
        if (at_block := _first_repeated(table)) is not None:
            raise InvalidRequest(f"{path}.block_ids[{at_block}]", f"names block {table[at_block]} twice")
        most = min(len(tokens) - 1, len(table) * limits.block_size)
        if new.computed_tokens > most:
            raise InvalidRequest(
                f"{path}.computed_tokens",
                f"must be from 0 to {most} (below {len(tokens)} tokens, within {len(table)} blocks of "
                f"{limits.block_size}), got {new.computed_tokens}",
            )
        if new.sampling is NO_SAMPLING:
            raise InvalidRequest(f"{path}.sampling", "must be set")
        check_sampling(f"{path}.sampling", new.sampling, limits.vocab_size, limits.max_model_len)
        self._new[new.seq_id] = (index, new)
        self._new_held[new.seq_id] = set(table)

    # -- appended blocks

    def _check_appends(self) -> list[tuple[int, int]]:
        seqs, blocks = self._step.append_seqs, self._step.append_blocks
        check_columns("append_blocks", blocks, "append_seqs", seqs)
        _check_blocks("append_blocks", blocks, self._limits.num_device_blocks)
        for index, (seq_id, block) in enumerate(zip(seqs, blocks, strict=True)):
            state = self._state(f"append_seqs[{index}]", seq_id)
            held = self._new_held[seq_id] if seq_id in self._new else self._held[seq_id]
            added = self._appended.setdefault(seq_id, {})
            if block in held or block in added:
                raise InvalidRequest(
                    f"append_blocks[{index}]", f"block {block} is in the table of sequence {seq_id} already"
                )
            added[block] = None
            if len(state.block_table) + len(added) > self._limits.max_blocks:
                raise InvalidRequest(
                    f"append_blocks[{index}]",
                    f"the table of sequence {seq_id} must have at most {self._limits.max_blocks} blocks",
                )
        return list(zip(seqs, blocks, strict=True))

    def _state(self, path: str, seq_id: int) -> SequenceState:
        """The state of a sequence that is live in this step."""
        if seq_id in self._new:
            return self._new[seq_id][1]
        if seq_id not in self._live or seq_id in self._finished:
            raise InvalidRequest(path, f"must be a live sequence, got {seq_id}")
        return self._live[seq_id]

    # -- scheduled tokens

    def _counts(self) -> dict[int, int]:
        """Tokens to compute by seq_id, for the sequences that the step names."""
        seqs, tokens = self._step.scheduled_seqs, self._step.scheduled_tokens
        check_columns("scheduled_tokens", tokens, "scheduled_seqs", seqs)
        counts: dict[int, int] = {}
        for index, (seq_id, count) in enumerate(zip(seqs, tokens, strict=True)):
            state = self._state(f"scheduled_seqs[{index}]", seq_id)
            if seq_id in counts:
                raise InvalidRequest(f"scheduled_seqs[{index}]", f"names sequence {seq_id} twice")
            left = len(state.token_ids) - state.computed_tokens
            if count > left:
                raise InvalidRequest(
                    f"scheduled_tokens[{index}]",
                    f"must be from 0 to {left}, the tokens sequence {seq_id} has left to compute, got {count}",
                )
            counts[seq_id] = count
        return counts

    def _schedule(self, checked: CheckedStep, counts: dict[int, int]) -> None:
        """Fills `scheduled`, checking that every computed position has a slot that no other sequence writes."""
        block_size, max_len = self._limits.block_size, self._limits.max_model_len
        states = [state for seq_id, state in self._live.items() if seq_id not in self._finished]
        states += checked.new
        # Block to the one sequence that writes it in this step.
        writers: dict[int, int] = {}
        total = 0
        for state in states:
            seq_id = state.seq_id
            count = counts.get(seq_id, 1)
            if not count:
                continue
            table, start = state.block_table, state.computed_tokens
            end = start + count
            added = list(self._appended[seq_id]) if seq_id in self._appended else []
            num_blocks = len(table) + len(added)
            if end > num_blocks * block_size or end > max_len:
                raise self._no_slots(state, end, num_blocks)
            for logical in range(start // block_size, (end - 1) // block_size + 1):
                block = table[logical] if logical < len(table) else added[logical - len(table)]
                if writers.setdefault(block, seq_id) != seq_id:
                    raise self._written_twice(block, writers[block], seq_id)
            total += count
            checked.scheduled.append(Scheduled(state, start, count))
        if total > MAX_STEP_TOKENS:
            raise InvalidRequest(
                "scheduled_tokens", f"a step must compute at most {MAX_STEP_TOKENS} tokens, not {total}"
            )
        checked.num_tokens = total

    def _no_slots(self, state: SequenceState, end: int, num_blocks: int) -> InvalidRequest:
        what = f"sequence {state.seq_id} would compute position {end - 1}"
        if end > self._limits.max_model_len:
            return InvalidRequest(
                self._tokens_path(state.seq_id), f"{what}, the model holds {self._limits.max_model_len} tokens"
            )
        return InvalidRequest(
            self._blocks_path(state.seq_id),
            f"{what}, its {num_blocks} blocks of {self._limits.block_size} hold positions below "
            f"{num_blocks * self._limits.block_size}",
        )

    def _written_twice(self, block: int, first: int, second: int) -> InvalidRequest:
        return InvalidRequest(
            self._blocks_path(second), f"block {block} would be written by sequences {first} and {second} in one step"
        )

    def _blocks_path(self, seq_id: int) -> str:
        """The field that gives a sequence its blocks."""
        return f"new_seqs[{self._new[seq_id][0]}].block_ids" if seq_id in self._new else "append_blocks"

    def _tokens_path(self, seq_id: int) -> str:
        """The field that says how many tokens a sequence computes."""
        seqs = self._step.scheduled_seqs
        return f"scheduled_tokens[{seqs.index(seq_id)}]" if seq_id in seqs else "scheduled_seqs"


def _check_blocks(path: str, blocks: list[int], pool_size: int) -> None:
    """Raises InvalidRequest for the first id that is not in the pool."""
    if blocks and max(blocks) >= pool_size:
        index = next(i for i, block in enumerate(blocks) if block >= pool_size)
        raise InvalidRequest(f"{path}[{index}]", f"must be a block id below {pool_size}, got {blocks[index]}")


def _first_repeated(ids: list[int]) -> int | None:
    """Index of the first id that stood before; None when all differ."""
    if len(set(ids)) == len(ids):
        return None
    seen: set[int] = set()
    for index, number in enumerate(ids):
        if number in seen:
            return index
        seen.add(number)
    return None
