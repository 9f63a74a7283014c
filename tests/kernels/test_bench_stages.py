"""Stages of the bench: use of time and memory, and cases that are left out."""

from __future__ import annotations

import pytest
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import __main__ as bench_main
from pagekv.kernels.bench import stages
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.report import text
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.stages import Bench
from pagekv.kernels.bench.workload import (
    MHA,
    STAGES,
    AttentionCase,
    BlockCopyCase,
    Heads,
    WriteCase,
)
from pagekv.kernels.variants import Variant

SMALL = Heads("GQA 2", 2, 1)
HALF = Variant("float16", "float16", 64)


def bench_on(machine: HostMachine, arena: Arena, seconds: float = 1e9) -> Bench:
    return Bench(machine, arena, seconds, lambda line: None)


def test_every_stage_has_its_rows(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cases in {
        "decode_cases": [AttentionCase(SMALL, 1, 17)],
        "prefill_cases": [AttentionCase(SMALL, 1, 24, 24)],
        "write_cases": [WriteCase(SMALL, 3)],
        "block_copy_cases": [BlockCopyCase(SMALL, 2), BlockCopyCase(SMALL, 3)],
    }.items():
        monkeypatch.setattr(stages, name, lambda cases=cases: cases)
    bench = bench_on(machine, arena)
    found = bench.measure()
    assert [len(found[name]) for name in STAGES] == [1, 1, 1, 2]
    assert found["block copy"][0]["case"] == "copy of 2 blocks of 0.25 MiB"
    assert bench.notes == []
    page = text({"machine": {"gpu": "none"}, **found, "notes": [], "seconds": 3.0})
    assert all(f"\n{name} " in page for name in STAGES)


def test_a_stage_stops_when_its_time_is_up_and_names_what_is_left(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena, seconds=-1)
    cases = [AttentionCase(SMALL, 1, context) for context in range(16, 24)]
    assert list(bench.in_reach("decode", 0.5, cases)) == cases[:1]
    assert "no time was left" in bench.notes[0]
    assert f"1 x {23}" in bench.notes[0]


def test_cases_that_do_not_fit_are_named_not_tried(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    assert list(bench.in_reach("decode", 0.5, [AttentionCase(MHA, 256, 65536)])) == []
    assert "MHA, 256 x 64k: more than the 0 GiB of memory" in bench.notes[0]


def test_some_correctness_is_checked_however_short_the_time(machine: HostMachine, arena: Arena) -> None:
    said: list[str] = []
    bench = Bench(machine, arena, -1, said.append)
    assert bench.correctness([Setup(HALF, (3,)), Setup(HALF, (4,))])
    assert all(line.startswith("ok") for line in said)
    assert len(said) > 3
    assert bench.notes == [f"correctness {Setup(HALF, (4,))}: no time was left"]


def test_stages_share_less_than_all_the_time() -> None:
    shares = [stages.CORRECTNESS, *STAGES.values()]
    assert shares == sorted(shares)
    assert bench_main.TOTAL_SECONDS * shares[-1] < 8 * 60 - 15
