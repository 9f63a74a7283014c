"""A step as it arrives, with nothing in it checked yet, and the result that is reported; without protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.executor.backend.interface import BlockCopies, Sampled, Sampling, SequenceState

# Stands for the missing `sampling` of a new sequence's message, compared by identity. Such a step is refused.
NO_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with the fields, order and meaning of `StepRequest` in the contract. Columns pair by position."""

    epoch: int
    step: int
    finished_seqs: list[int] = field(default_factory=list)
    memory_ops: list[BlockCopies] = field(default_factory=list)
    new_seqs: list[SequenceState] = field(default_factory=list)
    append_seqs: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    scheduled_seqs: list[int] = field(default_factory=list)
    scheduled_tokens: list[int] = field(default_factory=list)
    # The message's bytes, which rank 0 passes on unchanged; empty if they are not known.
    encoded: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """The result of one step. `sampled` is by seq_id, in the order in which the sequences entered the epoch. `failed`
    are the sequences that should have sampled but could not, because their logits are NaN in this or an earlier step.
    """

    epoch: int
    step: int
    sampled: dict[int, Sampled]
    computed_tokens: int
    execute_us: int
    idle_us: int
    failed: list[int] = field(default_factory=list)
    # 0: the backend does not report it.
    threads: int = 0
    # In a group: microseconds that each rank worked on a step, by rank.
    rank_us: tuple[int, ...] = ()
    # In a group: the `StateDigest` of the epoch up to this step.
    digest: bytes = b""
