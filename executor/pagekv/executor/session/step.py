"""A step as it arrives and what is reported of it, without protobuf. Nothing in an arriving step is checked yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.executor.backend.interface import CopyKind, Sampled


@dataclass(frozen=True, slots=True)
class MemoryOp:
    """Whole-block copies as asked for; `kind` is None when the message names none that is known."""

    kind: CopyKind | None
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class StepSampling:
    """The fields of `StepSampling` in the contract."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    min_tokens: int = 0
    banned_until_min: list[int] = field(default_factory=list)
    bias_token_ids: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters; `sampling` is None when the message has none."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    computed_tokens: int
    sampling: StepSampling | None


@dataclass(frozen=True, slots=True)
class Step:
    """One step; fields, order and meaning as `StepRequest` in the contract. Columns pair by position."""

    epoch: int
    step: int
    finished_seqs: list[int] = field(default_factory=list)
    memory_ops: list[MemoryOp] = field(default_factory=list)
    new_seqs: list[NewSequence] = field(default_factory=list)
    append_seqs: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    scheduled_seqs: list[int] = field(default_factory=list)
    scheduled_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """What one step produced. `sampled` is by seq_id, in the order the sequences entered the epoch."""

    epoch: int
    step: int
    sampled: dict[int, Sampled]
    computed_tokens: int
    execute_us: int
    idle_us: int
