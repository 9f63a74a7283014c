"""An epoch: the live sequences of one manager, and how a step changes them. No asyncio, no gRPC.

A step moves through `check_step`, which touches nothing; then `Epoch.launch` changes state and hands it to the backend;
then `LaunchedStep.collect` fills in what it sampled. Later steps may be launched in between.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pagekv.executor.backend.interface import (
    UNKNOWN_TOKEN,
    Backend,
    Finished,
    Launch,
    Sampled,
    Scheduled,
    SequenceState,
)
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_check import CheckedStep, EpochLimits, check_step


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
    # The blocks of every live sequence's table, for membership tests that do not grow with the table.
    held: dict[int, set[int]] = field(default_factory=dict)
    next_step: int = 1
    over: bool = False
    failed: bool = False
    # perf_counter_ns at the end of the step before; 0: no step yet.
    _last_end: int = 0

    def launch(self, step: Step) -> LaunchedStep:
        """Checks and applies a step and hands it to the backend. Raises InvalidRequest or StaleEpoch before anything is
        touched; after any other exception, from the backend, state and memory are undefined: the epoch is over.
        """
        begin = time.perf_counter_ns()
        checked = check_step(step, self.epoch, self.next_step, self.live, self.held, self.limits)
        self._apply(checked)
        launch = self.backend.launch(checked.scheduled) if checked.scheduled else Finished({})
        sampling = self._advance(checked.scheduled)
        self.next_step += 1
        return LaunchedStep(self, step.step, begin, checked.num_tokens, launch, sampling)

    def _apply(self, checked: CheckedStep) -> None:
        """Changes state in the order of the contract: finish, copy, enter, append."""
        if checked.finished:
            self.backend.finish([self.live[seq_id] for seq_id in checked.finished])
        for seq_id in checked.finished:
            del self.live[seq_id], self.held[seq_id]
        for copies in checked.copies:
            if copies.sources:
                self.backend.copy_blocks(copies)
        for state in checked.new:
            self.live[state.seq_id] = state
            self.held[state.seq_id] = set(state.block_table)
        for seq_id, block in checked.appends:
            self.live[seq_id].block_table.append(block)
            self.held[seq_id].add(block)

    def report(self, step: int, begin: int, num_tokens: int, sampled: dict[int, Sampled]) -> ExecutedStep:
        """The report of a step that ends now. A step launched while the one before ran begins when that one ends."""
        end = time.perf_counter_ns()
        idle = max(0, begin - self._last_end) if self._last_end else 0
        execute = end - max(begin, self._last_end)
        self._last_end = end
        return ExecutedStep(
            epoch=self.epoch,
            step=step,
            sampled=sampled,
            computed_tokens=num_tokens,
            execute_us=execute // 1000,
            idle_us=idle // 1000,
        )

    @staticmethod
    def _advance(scheduled: list[Scheduled]) -> list[tuple[SequenceState, int]]:
        """Counts scheduled positions as computed; returns sequences that sample with the index of the unknown token."""
        sampling = []
        for item in scheduled:
            state = item.state
            state.computed_tokens = item.start + item.count
            if state.computed_tokens == len(state.token_ids):
                sampling.append((state, len(state.token_ids)))
                state.token_ids.append(UNKNOWN_TOKEN)
        return sampling


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

    @property
    def ready(self) -> bool:
        return self._launch.ready

    def collect(self) -> ExecutedStep:
        """Waits for the step and fills in its tokens. Raises what the backend raised, and RuntimeError when it sampled
        others than it should: the epoch is over then.
        """
        sampled, ordered = self._launch.collect(), {}
        for state, index in self._sampling:
            chosen = ordered[state.seq_id] = sampled[state.seq_id]
            state.token_ids[index] = chosen.token_id
        if len(ordered) != len(sampled):
            odd = sorted(sampled.keys() - ordered.keys())
            raise RuntimeError(f"the backend sampled sequences that have tokens left to compute: {odd}")
        return self._epoch.report(self._step, self._begin, self._num_tokens, ordered)
