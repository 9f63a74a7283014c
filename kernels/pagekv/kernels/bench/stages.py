"""The stages of the bench. Each has a share of the time; cases for which there is no time or memory are named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pagekv.kernels.bench import speed
from pagekv.kernels.bench.correctness import checks
from pagekv.kernels.bench.machine import Arena, CudaMachine
from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.workload import STAGES, block_copy_cases, decode_cases, prefill_cases, write_cases
from pagekv.kernels.cupy_launcher import Say

Case = TypeVar("Case")

CORRECTNESS = 0.40


class Bench:
    """One run of at most `seconds`."""

    def __init__(self, machine: CudaMachine, arena: Arena, seconds: float, say: Say) -> None:
        self.machine, self.arena, self.seconds, self.say = machine, arena, seconds, say
        self.started = time.monotonic()
        self.notes: list[str] = []
        """Parts that were not measured, with the reason."""

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    def in_reach(self, name: str, share: float, cases: Iterable[Case]) -> Iterator[Case]:
        """The cases that fit the memory and begin before `share` of the time is spent, the first one at any time; the
        others are named in `notes`.
        """
        large, late = [], []
        for number, case in enumerate(cases):
            if getattr(case, "pool_bytes", 0) > self.arena.size:
                large.append(str(case))
            elif number and self.spent > share * self.seconds:
                late.append(str(case))
            else:
                yield case
        if large:
            self.notes.append(f"{name} {'; '.join(large)}: more than the {self.arena.size >> 30} GiB of memory")
        if late:
            self.notes.append(f"{name} {'; '.join(late)}: no time was left")

    def correctness(self, wanted: Iterable[Setup]) -> bool:
        passed = True
        for setup in self.in_reach("correctness", CORRECTNESS, wanted):
            for check in checks(self.machine, setup):
                passed &= check.passed
                self.say(str(check))
        return passed

    def measure(self) -> Row:
        """Everything that was measured, as JSON: copy bandwidth, and the rows of each stage."""
        copy = speed.copy_bandwidth(self.machine, self.arena)
        self.say(f"device copy: {copy:.0f} GB/s")
        stages: dict[str, tuple[Callable[..., Row], Iterable[Any]]] = {
            "decode": (speed.attention_row, decode_cases()),
            "prefill": (speed.attention_row, prefill_cases()),
            "cache write": (speed.write_row, write_cases()),
            "block copy": (speed.block_copy_row, block_copy_cases()),
        }
        result: Row = {"copy_gb_per_s": copy}
        for name, (row, cases) in stages.items():
            reached = self.in_reach(name, STAGES[name], cases)
            result[name] = [row(self.machine, self.arena, case, copy) for case in reached]
            self.say(f"{name}: {len(result[name])} cases, {self.spent:.0f} s so far")
        return result
