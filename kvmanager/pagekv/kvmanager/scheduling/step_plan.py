"""One step and its result, without protobuf; `engine.executor_wire` turns them into messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq

NOBODY = np.empty(0, np.intp)


class CopyKind(Enum):
    """The pools between which a whole block is copied."""

    COPY = "copy"  # device to device
    SWAP_OUT = "swap_out"  # device to host
    SWAP_IN = "swap_in"  # host to device


class BlockCopy(NamedTuple):
    """One block to copy: block ids in the pools that `kind` connects."""

    kind: CopyKind
    source: int
    destination: int


class CopyRun(NamedTuple):
    """Copies of one kind, one after the other; sources and destinations pair by position."""

    kind: CopyKind
    # uint32.
    sources: array[int]
    destinations: array[int]


class CopyList:
    """Copies in order, as runs: a million tokens that are swapped out are two columns, not 62,500 objects."""

    def __init__(self, copies: Iterable[BlockCopy] = ()) -> None:
        self.runs: list[CopyRun] = []
        for kind, source, destination in copies:
            self.add(kind, [source], [destination])

    def add(self, kind: CopyKind, sources: list[int], destinations: list[int]) -> None:
        """Adds copies of `sources` into as many `destinations`; the lists stay the caller's."""
        if not sources:
            return
        if not self.runs or self.runs[-1].kind is not kind:
            self.runs.append(CopyRun(kind, array("I"), array("I")))
        self.runs[-1].sources.extend(sources)
        self.runs[-1].destinations.extend(destinations)

    def __len__(self) -> int:
        return sum(len(run.sources) for run in self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[BlockCopy]:
        for kind, sources, destinations in self.runs:
            yield from map(BlockCopy, repeat(kind), sources, destinations)

    def take(self) -> CopyList:
        """Removes and returns all copies."""
        taken = CopyList()
        taken.runs, self.runs = self.runs, []
        return taken


@dataclass(frozen=True, slots=True)
class NewSeq:
    """A sequence that enters the executor, as it stood when the step was planned."""

    sequence: Seq
    seq_id: int
    token_ids: array[int]
    block_ids: array[int]
    computed_tokens: int


class Admitted(NamedTuple):
    """A sequence at its first admission, and the outcome of its prefix lookup."""

    sequence: Seq
    # Leading blocks that hit, on the device and, after those, in the host pool.
    hit_blocks: int
    # Digest of the first full block that did not hit; None if there is none, or a pool has that block all the same.
    missed: bytes | None
    # Leading tokens of the missed block that a cached block after the same prefix shares.
    shared_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step, in the order the executor applies it. Columns of equal length pair by position."""

    finished: list[int] = field(default_factory=list)
    # Blocks to copy, one after the other, before anything is computed.
    copies: CopyList = field(default_factory=CopyList)
    new: list[NewSeq] = field(default_factory=list)
    append_seq_ids: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    # Sequences that do not compute exactly one token in this step.
    scheduled_seq_ids: list[int] = field(default_factory=list)
    scheduled_tokens: list[int] = field(default_factory=list)
    num_tokens: int = 0

    # The rest is not sent to the executor. Number of sequences that decode, one token each.
    num_decodes: int = 0
    # Seq_ids of the sequences that sample in this step, ascending.
    sampling: NDArray[np.intp] = field(default_factory=lambda: NOBODY)
    # Members of `sampling` that are beams: their likeliest tokens count, not the sampled one.
    beams: dict[int, Seq] = field(default_factory=dict)
    # Members of `sampling` that sample for the first time since they entered the executor.
    prefilled: list[int] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    # Sequences preempted since the plan before; True where blocks of the sequence were kept in the host pool.
    preempted: list[tuple[Seq, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The executor's report of a step, checked."""

    step: int
    # Ascending: those of the plan's `sampling` that did not fail.
    sampled_seq_ids: list[int]
    sampled_tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    computed_tokens: int
    execute_us: int
    idle_us: int
    # Reasons by seq_id, for sequences that would have sampled and cannot go on.
    failed: dict[int, str] = field(default_factory=dict)
    # Threads of the executor's processor that computed the step; 0: not reported.
    threads: int = 0
    # If the executor is a group of ranks: microseconds that each rank worked on a step.
    rank_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended with the token just committed. `stop_token_id` is this token if it caused the end."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """A step's results: one token for each of `sequences`, and which of them end with it, by position."""

    sequences: list[Seq]
    # The sequences' numbers in that step.
    seq_ids: list[int]
    token_ids: list[int]
    endings: dict[int, Ending]
    # Requests whose beam search is done.
    searched: list[LiveRequest]
    # Requests that cannot go on, and why; every sequence of them is finished.
    failed: list[tuple[LiveRequest, str]] = field(default_factory=list)
