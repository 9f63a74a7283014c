"""An epoch: the live sequences of one manager, and how a step changes them. No asyncio, no gRPC.

A step goes through three stages: `check_step` checks it and changes nothing; `Epoch.launch` applies it and hands it to
the backend; `LaunchedStep.collect` fills in the sampled tokens. Later steps may be launched before it is collected.
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
    """The other ranks of a group, as rank 0 uses them: every rank executes the same steps."""

    def hand_on(self, epoch: int, limits: EpochLimits, step: Step) -> None:
        """Passes a step on to the other ranks before rank 0 checks it. Called in the order of steps. Raises
        `RanksDiffer`.
        """
        ...

    def collected(self, epoch: int, step: int, digest: bytes, worked_us: int) -> tuple[int, ...]:
        """Adds rank 0's result of a step and compares it with those of the other ranks that have arrived; waits until
        all results of the step before have. Called in the order of steps, by the thread that collects. Returns the
        microseconds that each rank worked on the latest step that all have finished, by rank; empty if there is no such
        step, or once a step of a later epoch was passed on. Raises `RanksDiffer`.
        """
        ...


def is_lost(backend: Backend, error: Exception) -> bool:
    """`Backend.is_lost`, or True if that call fails, so that the original error is reported in any case."""
    try:
        return backend.is_lost(error)
    except Exception:
        log.exception("a backend cannot say whether it is lost")
        return True


class RanksDiffer(Exception):
    """Another rank's result of a step differs from rank 0's; the message names rank and step."""


@dataclass(slots=True)
class Epoch:
    """State of one epoch. Owned by the worker thread, with these exceptions: the event loop sets `over` to fence the
    epoch; the thread that collects steps changes `last_end`, `failed` and unknown tokens.

    `over` changes once, from False to True: then no further step is launched. `failed` does the same for collecting: no
    step after a failed one is reported.
    """

    epoch: int
    manager_id: str
    limits: EpochLimits
    backend: Backend
    # By seq_id, in the order in which the sequences entered the epoch.
    live: dict[int, SequenceState] = field(default_factory=dict)
    next_step: int = 1
    over: bool = False
    failed: bool = False
    # perf_counter_ns at the end of the last collected step; 0: none yet.
    last_end: int = 0
    # Set on rank 0 of a group.
    ranks: OtherRanks | None = None
    # Set on every rank of a group.
    digest: StateDigest | None = None
    written: WrittenSlots = field(init=False)

    def __post_init__(self) -> None:
        self.written = WrittenSlots(self.limits.num_device_blocks, self.limits.num_host_blocks)

    def launch(self, step: Step) -> LaunchedStep:
        """Checks a step, applies it and hands it to the backend. Raises InvalidRequest or StaleEpoch before anything
        has changed. After any other exception, which comes from the backend, state and memory are undefined, so the
        epoch must end.
        """
        begin = time.perf_counter_ns()
        if self.ranks is not None:
            self.ranks.hand_on(self.epoch, self.limits, step)
        checked = check_step(step, self.epoch, self.next_step, self.live, self.limits, self.written)
        live, scheduled = checked.live, checked.scheduled
        # The order of the contract: finish, copy, enter, append.
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
    """A step that was handed to the backend. Collected once, in the order of launching."""

    _epoch: Epoch
    _step: int
    # perf_counter_ns before the step was checked.
    _begin: int
    _num_tokens: int
    _launch: Launch
    # The sequences that sample, in the order they entered the epoch, with the index of the new token in `token_ids`.
    _sampling: list[tuple[SequenceState, int]]
    # On ranks of a group: the result of `StateDigest.launched`.
    _digest: bytes = b""

    @property
    def ready(self) -> bool:
        return self._launch.ready

    def collect(self) -> ExecutedStep:
        """Waits for the step and fills in its tokens. Raises what the backend raised, and RuntimeError if the backend
        sampled sequences that should not sample. After an error the epoch must end.
        """
        sampled, ordered, failed = self._launch.collect(), {}, []
        for state, index in self._sampling:
            chosen = sampled[state.seq_id]
            if chosen.token_id < 0 or state.failed:
                # The sequence continues with token 0, so that steps planned before the failure is known stay valid.
                state.failed = True
                state.token_ids[index] = 0
                failed.append(state.seq_id)
            else:
                ordered[state.seq_id] = chosen
                state.token_ids[index] = chosen.token_id
        if len(self._sampling) != len(sampled):
            odd = sorted(sampled.keys() - ordered.keys() - set(failed))
            raise RuntimeError(f"the backend sampled sequences that have tokens left to compute: {odd}")
        # A step that was launched while the one before ran begins when that one ends.
        end, last_end = time.perf_counter_ns(), self._epoch.last_end
        self._epoch.last_end = end
        execute_us = (end - max(self._begin, last_end)) // 1000
        digest = b""
        rank_us: tuple[int, ...] = ()
        if self._epoch.digest is not None:
            digest = self._epoch.digest.collected(self._digest, ordered, failed)
            # Without the wait for other ranks, if the backend measures it.
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
            # 0 if the backend does not report it.
            threads=getattr(self._launch, "threads", 0),
            rank_us=rank_us,
            digest=digest,
        )
