"""The bench, stage by stage. Each stage has a share of the time; cases that time does not suffice for are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pagekv.kernels.bench import speed, swap_speed
from pagekv.kernels.bench.correctness import Check, checks, setups
from pagekv.kernels.bench.machine import Arena, Clock, CudaMachine
from pagekv.kernels.bench.report import BenchReport
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.workload import (
    BlockCopyCase,
    DecodeCase,
    PrefillCase,
    SwapCase,
    WriteCase,
    block_copy_cases,
    counts_for_paging,
    decode_cases,
    decode_floor,
    prefill_cases,
    swap_cases,
    write_cases,
)
from pagekv.kernels.cupy_launcher import Say

# Share of the time by whose end each stage stops. The next stage may use what is left.
CORRECTNESS, DECODE, PREFILL, MEMORY, SWAP = 0.40, 0.74, 0.85, 0.90, 0.97


@dataclass
class Bench:
    """One run."""

    machine: CudaMachine
    arena: Arena
    clock: Clock
    report: BenchReport
    say: Say

    def begins(self, section: str, case: str) -> bool:
        """Whether to measure a case; for subclasses that resume an interrupted run."""
        return True

    def found(self, section: str, row: dict[str, Any]) -> None:
        """Takes the row of each case as it is measured; for subclasses that record rows at once."""

    def until(self, share: float) -> Callable[[], bool]:
        """Whether there is time left before `share` of the total is spent."""
        return self.clock.until(share)

    def correctness(self, wanted: Iterable[Setup] | None = None) -> bool:
        """Whether every check passed. Stops at a setup's end when time is up; the first setup always runs."""
        passed, unchecked = True, []
        in_time = self.until(CORRECTNESS)
        for index, setup in enumerate(setups() if wanted is None else wanted):
            if index and not in_time():
                unchecked.append(str(setup))
            elif self.begins("correctness", str(setup)):
                found = list(checks(self.machine, setup))
                passed &= all(check.passed for check in found)
                for check in found:
                    self.tell(check)
                self.found("correctness", {"case": str(setup), "checks": [check.row() for check in found]})
        if unchecked:
            self.report.late = True
            self.report.notes.append(f"correctness of {'; '.join(unchecked)}: no time was left")
        return passed

    def tell(self, check: Check) -> None:
        """Says the result of a check in one line."""
        mark = "ok" if check.passed else "WRONG"
        self.say(f"{mark:<6}{check.name}: error {check.error:.2g}, allowed {check.allowed:.2g}")

    def bandwidth(self) -> None:
        """Measures device copies, GB/s with read and written bytes both counted."""
        self.report.copy_gb_per_s = speed.copy_bandwidth(self.machine, self.arena)
        self.say(f"device copy: {self.report.copy_gb_per_s:.0f} GB/s")

    def decode(self, cases: Iterable[DecodeCase] | None = None) -> None:
        """Measures decode `cases`, all of the workload by default, each with the floors that it counts for."""

        def row(case: DecodeCase) -> dict[str, Any]:
            found = speed.decode_row(self.machine, self.arena, case, self.report.copy_gb_per_s)
            counts = {"layers": found.get("against_compact")}
            if floor := decode_floor(case):
                counts[floor] = found["share_of_copy"]
            if counts_for_paging(case):
                counts["paged"] = found["against_no_table"]
            return found | {"counts_for": counts}

        self._section("decode", DECODE, decode_cases() if cases is None else cases, row)

    def prefill(self, cases: Iterable[PrefillCase] | None = None) -> None:
        """Measures prefill `cases`, all of the workload by default; prompts of 4k count for the floor."""

        def row(case: PrefillCase) -> dict[str, Any]:
            found = speed.prefill_row(self.machine, self.arena, case)
            if (case.new, case.cached) == (4096, 0):
                found["counts_for"] = {"prefill": found["against_flash"]}
            return found

        self._section("prefill", PREFILL, prefill_cases() if cases is None else cases, row)

    def memory(self, writes: Iterable[WriteCase] | None = None, copies: Iterable[BlockCopyCase] | None = None) -> None:
        """Measures cache writes and block copies, all of the workload by default."""

        def write(case: WriteCase) -> dict[str, Any]:
            return speed.write_row(self.machine, self.arena, case, self.report.copy_gb_per_s)

        def copy(case: BlockCopyCase) -> dict[str, Any]:
            return speed.block_copy_row(self.machine, self.arena, case, self.report.copy_gb_per_s)

        self._section("memory", MEMORY, write_cases() if writes is None else writes, write)
        self._section("memory", MEMORY, block_copy_cases() if copies is None else copies, copy)

    def swap(self, cases: Iterable[SwapCase] | None = None) -> None:
        """Measures swaps in both directions beside one pinned copy; block sizes from 16 up count for the floor."""
        cases = list(swap_cases() if cases is None else cases)
        room = max(case.bytes for case in cases) * 4
        if room > self.arena.size:
            self.report.notes.append(f"swap: {room} bytes of device memory are needed")
            return
        host = self.machine.pinned(room)
        memcpy = swap_speed.memcpy_gb_per_s(self.machine, self.arena, host)
        self.say(f"one pinned copy: {memcpy[0]:.1f} GB/s out, {memcpy[1]:.1f} GB/s in")

        def row(case: SwapCase) -> dict[str, Any]:
            found = swap_speed.swap_row(self.machine, self.arena, host, case, memcpy)
            if case.block_size >= 16:
                found["counts_for"] = {"swap": min(found["out_against_memcpy"], found["in_against_memcpy"])}
            return found

        self._section("swap", SWAP, cases, row)

    def _section(self, name: str, share: float, cases: Iterable[Any], measure: Callable[[Any], dict[str, Any]]) -> None:
        """Measures cases until the stage's time is up; names the cases that memory or time did not suffice for."""
        in_time = self.until(share)
        rows = self.report.sections.setdefault(name, [])
        large, late = [], []
        for case in cases:
            label = case.name
            if getattr(case, "pool_bytes", 0) > self.arena.size:
                large.append(label)
            elif not in_time():
                late.append(label)
            elif self.begins(name, label):
                rows.append(measure(case))
                self.found(name, rows[-1])
        if large:
            self.report.notes.append(f"{name} {'; '.join(large)}: more than the {self.arena.size >> 30} GiB of memory")
        if late:
            self.report.late = True
            self.report.notes.append(f"{name} {'; '.join(late)}: no time was left")
        self.say(f"{name}: {len(rows)} cases, {self.clock.spent:.0f} s so far")
