"""A step as it arrives and what is reported of it, without protobuf. Nothing in an arriving step is checked yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.executor.backend.interface import BlockCopies, Sampled, Sampling, SequenceState

# The `sampling`, compared by identity, of a new sequence whose message has none. Refused.
NO_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Step:
    """One step; fields, order and meaning as `StepRequest` in the contract. Columns pair by position."""

    epoch: int
    step: int
    finished_seqs: list[int] = field(default_factory=list)
    memory_ops: list[BlockCopies] = field(default_factory=list)
    new_seqs: list[SequenceState] = field(default_factory=list)
    append_seqs: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    scheduled_seqs: list[int] = field(default_factory=list)
    scheduled_tokens: list[int] = field(default_factory=list)
    # The message, to be handed on as it came; empty where it is not known.
    encoded: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """The result of one step. `sampled` is by seq_id, in the order the sequences entered the epoch; `failed` are the
    sequences that would have sampled too, and could not, because their logits are not numbers or were not before.
    """

    epoch: int
    step: int
    sampled: dict[int, Sampled]
    computed_tokens: int
    execute_us: int
    idle_us: int
    failed: list[int] = field(default_factory=list)
    # 0: the backend does not say.
    threads: int = 0
    # Of a group: microseconds that each rank worked on a step, by rank.
    rank_us: tuple[int, ...] = ()
    # Of a group: what `StateDigest` makes of the epoch up to here.
    digest: bytes = b""
