"""Stages of the bench: use of time and memory, and cases that are left out."""

from __future__ import annotations

from typing import Any

from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import __main__ as bench_main
from pagekv.kernels.bench import stages
from pagekv.kernels.bench.machine import Arena, Clock
from pagekv.kernels.bench.report import BenchReport
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.stages import Bench
from pagekv.kernels.bench.workload import (
    MHA,
    BlockCopyCase,
    DecodeCase,
    Heads,
    SwapCase,
    WriteCase,
)
from pagekv.kernels.variants import Variant

SMALL = Heads("GQA 2", 2, 1)
HALF = Variant("float16", "float16", 64)


def bench_on(machine: HostMachine, arena: Arena, clock: Clock | None = None) -> Bench:
    return Bench(machine, arena, clock or Clock(1e9), BenchReport({"gpu": "none"}), lambda line: None)


def test_memory_and_swap_stages(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    bench.report.copy_gb_per_s = 1.0
    bench.memory([WriteCase(SMALL, 3)], [BlockCopyCase(SMALL, 2), BlockCopyCase(SMALL, 3)])
    bench.swap([SwapCase(1, 2, True), SwapCase(1, 2, False)])
    assert [len(bench.report.sections[name]) for name in ("memory", "swap")] == [3, 2]
    assert bench.report.sections["memory"][1]["case"] == "copy of 2 blocks of 0.25 MiB"
    assert bench.report.notes == []


def test_a_stage_stops_when_its_time_is_up_and_names_what_is_left(machine: HostMachine, arena: Arena) -> None:
    now = iter(range(0, 1000, 10))
    bench = bench_on(machine, arena, Clock(100, lambda: float(next(now))))
    bench.report.copy_gb_per_s = 1.0
    bench.decode([DecodeCase(SMALL, 1, context) for context in range(16, 24)])
    rows = bench.report.sections["decode"]
    assert 0 < len(rows) < 8
    assert "no time was left" in bench.report.notes[0]
    assert bench.report.late
    assert f"1 x {23}" in bench.report.notes[0]


def test_cases_that_do_not_fit_are_named_not_tried(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    bench.decode([DecodeCase(MHA, 256, 65536)])
    assert bench.report.sections["decode"] == []
    assert "MHA, 256 x 64k: more than the 0 GiB of memory" in bench.report.notes[0]


def test_a_case_that_a_subclass_leaves_out_is_not_measured(machine: HostMachine, arena: Arena) -> None:
    seen: list[tuple[str, str]] = []

    class Resumed(Bench):
        def begins(self, section: str, case: str) -> bool:
            seen.append((section, case))
            return case.endswith("17")

        def found(self, section: str, row: dict[str, Any]) -> None:
            seen.append((section, "found " + row["case"]))

    bench = Resumed(machine, arena, Clock(1e9), BenchReport({}, copy_gb_per_s=1.0), lambda line: None)
    bench.decode([DecodeCase(SMALL, 1, context) for context in (16, 17)])
    names = [DecodeCase(SMALL, 1, context).name for context in (16, 17)]
    assert seen == [("decode", names[0]), ("decode", names[1]), ("decode", "found " + names[1])]
    assert bench.correctness([Setup(HALF, (3,))])
    assert len(seen) == 4  # asked, and left out


def test_stages_share_less_than_all_the_time() -> None:
    shares = [stages.CORRECTNESS, stages.DECODE, stages.PREFILL, stages.MEMORY, stages.SWAP]
    assert shares == sorted(shares)
    assert bench_main.TOTAL_SECONDS * stages.SWAP < 8 * 60 - 15
