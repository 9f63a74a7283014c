"""A sequence: one branch of a request, its tokens, its block table and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagekv.kvmanager.request import GenerateCommand, RequestStream


class SequenceState(Enum):
    """WAITING ⇄ RUNNING (admit, preempt) → DRAINING (every token it may have is in flight) → FINISHED.

    Any state → FINISHED by abort or stop.
    """

    WAITING = "waiting"  # holds no blocks, unknown to the executor
    RUNNING = "running"  # holds blocks, takes part in steps
    DRAINING = "draining"  # holds blocks, computes nothing more, its last token is still in flight
    FINISHED = "finished"  # holds nothing


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with at least one sequence that has not finished."""

    command: GenerateCommand
    stream: RequestStream
    arrival: int
    root: bytes
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress, in tokens. Invariants while RUNNING or DRAINING:

    num_computed <= len(token_ids) + num_pending, and len(block_table) == ceil(max(known, num_computed) / block_size)
    where known is len(token_ids): blocks exist for what is known or being computed and for nothing else.
    """

    request: LiveRequest
    index: int
    token_ids: list[int]
    # Prompt tokens that are truly prompt: resumed tokens count as output.
    num_prompt: int
    # token_ids may grow to this length.
    max_total: int
    # (priority, arrival, index): smaller runs first and is preempted last.
    key: tuple[int, int, int]
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    # Digests of the full blocks of token_ids, computed once per block.
    digests: list[bytes] = field(default_factory=list)
    # Leading blocks of block_table that were hits or have been offered to the prefix table.
    num_published: int = 0
    # Positions whose keys and values are written by steps planned so far, in flight or done.
    num_computed: int = 0
    # Sampled tokens promised by steps in flight.
    num_pending: int = 0
    # Name of this stay at the executor; a new one at every admission.
    handle: int = 0
    # None until first admitted.
    cached_tokens: int | None = None
    preemptions: int = 0

    @property
    def num_total(self) -> int:
        """Tokens known or promised."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Tokens generated, resumed ones included."""
        return len(self.token_ids) - self.num_prompt
