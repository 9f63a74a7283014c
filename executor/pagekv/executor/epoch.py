"""An epoch: the live sequences of one manager, and how a step changes them. No asyncio, no gRPC.

A step moves through `check_step` (which touches nothing) and then `run`, which alone changes state and memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pagekv.executor.backend import Backend, BlockCopies, Sampled, Scheduled, SequenceState
from pagekv.executor.step import Step, StepReport
from pagekv.executor.step_check import CheckedStep, EpochLimits, check_step


@dataclass(slots=True)
class Epoch:
    """State of one epoch. Owned by the compute thread, except `over`, which the event loop sets to fence it.

    `over` goes from False to True once and never back; whoever runs steps looks at it before each one.
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
    # perf_counter_ns at the end of the step before; 0: no step yet.
    _last_end: int = 0

    def run(self, step: Step) -> StepReport:
        """Checks, applies and executes a step. Raises InvalidRequest or StaleEpoch before anything is touched; any
        other exception comes from the backend and leaves state and memory undefined: the epoch is over then.
        """
        begin = time.perf_counter_ns()
        checked = check_step(step, self.epoch, self.next_step, self.live, self.held, self.limits)
        self._apply(checked)
        sampled = self.backend.execute(checked.scheduled) if checked.scheduled else {}
        ordered = self._advance(checked.scheduled, sampled)
        self.next_step += 1
        end = time.perf_counter_ns()
        idle = begin - self._last_end if self._last_end else 0
        self._last_end = end
        return StepReport(
            epoch=self.epoch,
            step=step.step,
            sampled=ordered,
            computed_tokens=checked.num_tokens,
            execute_us=(end - begin) // 1000,
            idle_us=idle // 1000,
        )

    def _apply(self, checked: CheckedStep) -> None:
        """In the order of the contract: leave, copy, enter, append."""
        for seq_id in checked.finished:
            del self.live[seq_id], self.held[seq_id]
        for copies in checked.copies:
            self._copy(copies)
        for state in checked.new:
            self.live[state.seq_id] = state
            self.held[state.seq_id] = set(state.block_table)
        for seq_id, block in checked.appends:
            self.live[seq_id].block_table.append(block)
            self.held[seq_id].add(block)

    def _copy(self, copies: BlockCopies) -> None:
        if copies.sources:
            self.backend.copy_blocks(copies)

    @staticmethod
    def _advance(scheduled: list[Scheduled], sampled: dict[int, Sampled]) -> dict[int, Sampled]:
        """Moves every sequence on by what was computed. Raises RuntimeError when the backend sampled others."""
        ordered: dict[int, Sampled] = {}
        for item in scheduled:
            state = item.state
            state.computed_tokens = item.start + item.count
            if state.computed_tokens == len(state.token_ids):
                chosen = ordered[state.seq_id] = sampled[state.seq_id]
                state.token_ids.append(chosen.token_id)
        if len(ordered) != len(sampled):
            odd = sorted(sampled.keys() - ordered.keys())
            raise RuntimeError(f"the backend sampled sequences that have tokens left to compute: {odd}")
        return ordered
