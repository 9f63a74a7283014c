"""An epoch: the live sequences of one manager, and how a step changes them. No asyncio, no gRPC.

A step moves through `check_step`, which touches nothing; then `Epoch.launch` changes state and hands it to the backend;
then `LaunchedStep.collect` fills in what it sampled. Later steps may be launched in between.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pagekv.common.logs import Log
from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Backend, Finished, Launch, SequenceState
from pagekv.executor.session.state_digest import StateDigest
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_check import EpochLimits, check_step
from pagekv.executor.session.written_slots import WrittenSlots

log = Log(__name__)


class OtherRanks(Protocol):
    """The ranks that rank 0 leads, which do with each step what it does."""

    def hand_on(self, epoch: int, limits: EpochLimits, step: Step) -> None:
        """Sends them a step before rank 0 looks at it; called in the order of steps. Raises `RanksDiffer`."""
        ...

    def collected(self, epoch: int, step: int, digest: bytes, worked_us: int) -> tuple[int, ...]:
        """Compares a step of rank 0's with theirs, as far as they have come, but for the one before at least. Called in
        the order of steps, by the thread that collects. Returns the microseconds that each rank worked on the latest
        step that all have ended, by rank; empty where there is none, and once a step of a later epoch was handed on.
        Raises `RanksDiffer`.
        """
        ...


def is_lost(backend: Backend, error: Exception) -> bool:
    """As `Backend.is_lost`; a backend that fails to say is taken for lost, so that the error is told all the same."""
    try:
        return backend.is_lost(error)
    except Exception:
        log.exception("a backend cannot say whether it is lost")
        return True


class RanksDiffer(Exception):
    """A rank did with a step something else than rank 0; the message names rank and step."""


@dataclass(slots=True)
class Epoch:
    """State of one epoch. Owned by the worker thread, except `over`, which the event loop sets to fence the epoch, and
    what collecting a step changes: the times of reports, and unknown tokens.

    `over` goes from False to True once and never back: no further step is launched. `failed` does the same for
    collecting: no step behind one that failed is reported.
    """

    epoch: int
    manager_id: str
    limits: EpochLimits
    backend: Backend
    # In the order they entered the epoch.
    live: dict[int, SequenceState] = field(default_factory=dict)
    next_step: int = 1
    over: bool = False
    failed: bool = False
    # perf_counter_ns at the end of the step before; 0: no step yet.
    last_end: int = 0
    # Of rank 0 of a group.
    ranks: OtherRanks | None = None
    # Of each rank of a group.
    digest: StateDigest | None = None
    written: WrittenSlots = field(init=False)

    def __post_init__(self) -> None:
        self.written = WrittenSlots(self.limits.num_device_blocks, self.limits.num_host_blocks)

    def launch(self, step: Step) -> LaunchedStep:
        """Checks and applies a step and hands it to the backend. Raises InvalidRequest or StaleEpoch before anything is
        touched; after any other exception, from the backend, state and memory are undefined: the epoch is over.
        """
        begin = time.perf_counter_ns()
        if self.ranks is not None:
            self.ranks.hand_on(self.epoch, self.limits, step)
        checked = check_step(step, self.epoch, self.next_step, self.live, self.limits, self.written)
        live, scheduled = checked.live, checked.scheduled
        # In the order of the contract: finish, copy, enter, append.
        if step.finished_seqs:
            self.backend.finish([self.live[seq_id] for seq_id in step.finished_seqs])
        for copies in step.memory_ops:
            if copies.sources:
                self.backend.copy_blocks(copies)
        checked.copied.apply()
        self.written.write(checked.ends)
        self.live = live
        for seq_id, block in zip(step.append_seqs, step.append_blocks, strict=True):
            state = live[seq_id]
            state.block_table.append(block)
            if state.blocks is not None:
                state.blocks.add(block)
        digest = self.digest.launched(step, live) if self.digest is not None else b""
        launch = self.backend.launch(scheduled) if scheduled else Finished({})
        sampling = []
        for item in scheduled:
            state = item.state
            state.computed_tokens = item.start + item.count
            if state.computed_tokens == len(state.token_ids):
                sampling.append((state, len(state.token_ids)))
                state.token_ids.append(UNKNOWN_TOKEN)
        self.next_step += 1
        return LaunchedStep(self, step.step, begin, checked.num_tokens, launch, sampling, digest)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the backend computes. Collected once, in the order of launching."""

    _epoch: Epoch
    _step: int
    # perf_counter_ns before the step was looked at.
    _begin: int
    _num_tokens: int
    _launch: Launch
    # Sequences that sample, in the order they entered the epoch, and the index in `token_ids` of the new token.
    _sampling: list[tuple[SequenceState, int]]
    # Of a group: that of the launched step.
    _digest: bytes = b""

    @property
    def ready(self) -> bool:
        return self._launch.ready

    def collect(self) -> ExecutedStep:
        """Waits for the step and fills in its tokens. Raises what the backend raised, and RuntimeError when it sampled
        others than it should: the epoch is over then.
        """
        sampled, ordered, failed = self._launch.collect(), {}, []
        for state, index in self._sampling:
            chosen = sampled[state.seq_id]
            if chosen.token_id < 0 or state.failed:
                # Steps that were planned before this is known count its tokens like those of any other.
                state.failed = True
                state.token_ids[index] = 0
                failed.append(state.seq_id)
            else:
                ordered[state.seq_id] = chosen
                state.token_ids[index] = chosen.token_id
        if len(self._sampling) != len(sampled):
            odd = sorted(sampled.keys() - ordered.keys() - set(failed))
            raise RuntimeError(f"the backend sampled sequences that have tokens left to compute: {odd}")
        # A step launched while the one before ran begins when that one ends.
        end, last_end = time.perf_counter_ns(), self._epoch.last_end
        self._epoch.last_end = end
        execute_us = (end - max(self._begin, last_end)) // 1000
        digest = b""
        rank_us: tuple[int, ...] = ()
        if self._epoch.digest is not None:
            digest = self._epoch.digest.collected(self._digest, ordered, failed)
            # Backends whose ranks wait for each other say how long.
            worked_us = max(0, execute_us - int(1e6 * getattr(self._launch, "waited_s", 0.0)))
            rank_us = (worked_us,)
            if self._epoch.ranks is not None:
                rank_us = self._epoch.ranks.collected(self._epoch.epoch, self._step, digest, worked_us)
        return ExecutedStep(
            epoch=self._epoch.epoch,
            step=self._step,
            sampled=ordered,
            computed_tokens=self._num_tokens,
            execute_us=execute_us,
            idle_us=max(0, self._begin - last_end) // 1000 if last_end else 0,
            failed=failed,
            # Backends need not say.
            threads=getattr(self._launch, "threads", 0),
            rank_us=rank_us,
            digest=digest,
        )
