"""The bench, stage by stage. Each stage has its share of the time; what it does not get to is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagekv.kernels.bench import speed, swap_speed
from pagekv.kernels.bench.correctness import Check, checks, setups
from pagekv.kernels.bench.flashinfer_peer import FlashInferPeer, to_text
from pagekv.kernels.bench.machine import Arena, Clock, Machine
from pagekv.kernels.bench.report import BenchReport, join_flashinfer
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

# Share of the time by whose end each stage stops. What a stage leaves is the next one's.
CORRECTNESS, DECODE, PREFILL, MEMORY, SWAP, PEERS = 0.35, 0.60, 0.70, 0.74, 0.80, 0.98


class Watcher(Protocol):
    """Is told what a bench begins and finds as it goes, so that a crash costs no more than the case that crashed."""

    def begins(self, section: str, case: str) -> bool:
        """A case is next. False: it is to be left out, because it was measured before or crashed before."""
        ...

    def found(self, section: str, row: dict[str, Any]) -> None:
        """Takes the row of a case that was measured."""
        ...


class Nobody:
    """The `Watcher` of a bench that runs in one go."""

    def begins(self, section: str, case: str) -> bool:
        """As `Watcher.begins`: every case is wanted."""
        return True

    def found(self, section: str, row: dict[str, Any]) -> None:
        """As `Watcher.found`: the report has it."""


@dataclass
class Bench:
    """One run."""

    machine: Machine
    arena: Arena
    clock: Clock
    report: BenchReport
    say: Say
    watcher: Watcher = field(default_factory=Nobody)
    one_stage: bool = False
    """Whether a single stage has all the time."""

    def correctness(self, wanted: Iterable[Setup] | None = None) -> bool:
        """Whether every check passed. Stops at a setup's end when time is up; the first setup always runs."""
        passed, unchecked = True, []
        in_time = self._until(CORRECTNESS)
        for index, setup in enumerate(setups() if wanted is None else wanted):
            if index and not in_time():
                unchecked.append(str(setup))
            elif self.watcher.begins("correctness", str(setup)):
                found = list(checks(self.machine, setup))
                passed &= all(check.passed for check in found)
                for check in found:
                    self.tell(check)
                self.watcher.found("correctness", {"case": str(setup), "checks": [check.row() for check in found]})
        if unchecked:
            self.report.late = True
            self.report.notes.append(f"correctness of {'; '.join(unchecked)}: no time was left")
        return passed

    def tell(self, check: Check) -> None:
        """One line of a check."""
        mark = "ok" if check.passed else "WRONG"
        self.say(f"{mark:<6}{check.name}: error {check.error:.2g}, allowed {check.allowed:.2g}")

    def bandwidth(self) -> None:
        self.report.copy_gb_per_s = speed.copy_bandwidth(self.machine, self.arena)
        self.say(f"device copy: {self.report.copy_gb_per_s:.0f} GB/s")

    def decode(self, cases: Iterable[DecodeCase] | None = None) -> None:
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
        def row(case: PrefillCase) -> dict[str, Any]:
            found = speed.prefill_row(self.machine, self.arena, case)
            if (case.new, case.cached) == (4096, 0):
                found["counts_for"] = {"prefill": found["against_flash"]}
            return found

        self._section("prefill", PREFILL, prefill_cases() if cases is None else cases, row)

    def memory(self, writes: Iterable[WriteCase] | None = None, copies: Iterable[BlockCopyCase] | None = None) -> None:
        bandwidth = self.report.copy_gb_per_s
        self._section(
            "memory",
            MEMORY,
            write_cases() if writes is None else writes,
            lambda case: speed.write_row(self.machine, self.arena, case, bandwidth),
        )
        self._section(
            "memory",
            MEMORY,
            block_copy_cases() if copies is None else copies,
            lambda case: speed.block_copy_row(self.machine, self.arena, case, bandwidth),
        )

    def swap(self, cases: Iterable[SwapCase] | None = None) -> None:
        cases = list(swap_cases() if cases is None else cases)
        room = max(case.bytes for case in cases) * 4
        if room > self.arena.size:
            self.report.notes.append(f"swap: {room} bytes of device memory are needed")
            return
        host = self.machine.pinned(room)
        memcpy = swap_speed.memcpy_gb_per_s(self.machine, self.arena, host)
        self.say(f"one pinned copy: {memcpy[0]:.1f} GB/s out, {memcpy[1]:.1f} GB/s in")

        def row(case: Any) -> dict[str, Any]:
            found = swap_speed.swap_row(self.machine, self.arena, host, case, memcpy)
            if case.block_size >= 16:
                found["counts_for"] = {"swap": min(found["out_against_memcpy"], found["in_against_memcpy"])}
            return found

        self._section("swap", SWAP, cases, row)

    def flashinfer(self, peer: Callable[[list[Any]], FlashInferPeer] = FlashInferPeer) -> None:
        """Measured last and in a process of its own: it compiles, which may take all that is left."""
        if not FlashInferPeer.installed():
            self.report.notes.append("FlashInfer: not installed (pip install flashinfer-python==0.6.6)")
            return
        # The cases of a floor first, then the rest, so that what time allows is what matters.
        rows = {to_text(case): (case, row) for case, row in self._measured()}
        order = sorted(rows, key=lambda text: "decode" not in rows[text][1].get("counts_for", {}))
        limit = max(5.0, self.clock.total * PEERS - self.clock.spent)
        self.say(f"FlashInfer, at most {limit:.0f} s")
        found = peer([rows[text][0] for text in order]).measure(limit)
        self.report.machine["flashinfer"] = found["version"] or "failed"
        for text, seconds in found["seconds"].items():
            join_flashinfer(*rows[text], seconds)
        missing = len(rows) - len(found["seconds"])
        if missing:
            self.report.notes.append(
                f"FlashInfer: {missing} of {len(rows)} cases: {found['note'] or 'no reason given'}"
            )

    def _measured(self) -> list[tuple[Any, dict[str, Any]]]:
        """Cases of decode and prefill that have a row and that the peer is asked for."""
        cases = {("decode", case.name): case for case in decode_cases() if case.plain}
        named: dict[tuple[str, str], Any] = {**cases, **{("prefill", case.name): case for case in prefill_cases()}}
        return [
            (named[section, row["case"]], row)
            for section in ("decode", "prefill")
            for row in self.report.sections.get(section, [])
            if (section, row["case"]) in named
        ]

    def _until(self, share: float) -> Callable[[], bool]:
        return self.clock.until(0.96 if self.one_stage else share)

    def _section(self, name: str, share: float, cases: Iterable[Any], measure: Callable[[Any], dict[str, Any]]) -> None:
        """Measures cases until the stage's time is up; names those that did not fit in memory or time."""
        in_time = self._until(share)
        rows = self.report.sections.setdefault(name, [])
        large, late = [], []
        for case in cases:
            label = case.name
            if getattr(case, "pool_bytes", 0) > self.arena.size:
                large.append(label)
            elif not in_time():
                late.append(label)
            elif self.watcher.begins(name, label):
                rows.append(measure(case))
                self.watcher.found(name, rows[-1])
        if large:
            self.report.notes.append(f"{name} {'; '.join(large)}: more than the {self.arena.size >> 30} GiB of memory")
        if late:
            self.report.late = True
            self.report.notes.append(f"{name} {'; '.join(late)}: no time was left")
        self.say(f"{name}: {len(rows)} cases, {self.clock.spent:.0f} s so far")
