"""What one step does and what came of it, without protobuf. `pagekv.kvmanager.wire` turns these into messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.kvmanager.request import TokenLogprobs
from pagekv.kvmanager.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters the executor, as it stood when the step was planned."""

    sequence: Sequence
    handle: int
    token_ids: list[int]
    block_ids: list[int]
    computed_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step, in the order the executor applies it. Columns of equal length pair by position."""

    finished: list[int]
    new: list[NewSequence] = field(default_factory=list)
    append_handles: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    # Sequences that do not compute exactly one token in this step.
    scheduled_handles: list[int] = field(default_factory=list)
    scheduled_tokens: list[int] = field(default_factory=list)
    # Who samples in this step: handle to sequence. Stays with the manager.
    sampling: dict[int, Sequence] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the executor reports of a step."""

    step: int
    sampled_handles: list[int]
    sampled_tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    computed_tokens: int
    execute_us: int
    idle_us: int
