"""Floors: which case counts for which, and the verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_first.floors import FLOORS, decode_floor, verdict_line, verdicts

from pagekv.kernels.bench.workload import GQA4, MHA, MQA, AttentionCase, decode_cases


def test_floors_take_the_worst_case_and_say_what_was_not_measured() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "a", "counts_for": {"decode": 0.95, "decode mqa": 0.99}},
        {"case": "b", "counts_for": {"decode": 0.85, "decode mqa": 0.98}},
        {"case": "c", "counts_for": {"decode": None}},
        {"case": "d"},
    ]
    floors = verdicts({"decode": rows})
    found = dict(zip(FLOORS, floors, strict=True))
    assert [found["decode"][key] for key in ("worst", "case", "reached")] == [0.85, "decode b", False]
    assert [found["decode mqa"][key] for key in ("worst", "reached")] == [0.98, True]
    assert [found["swap"][key] for key in ("worst", "reached")] == [None, None]
    lines = list(map(verdict_line, floors))
    assert f"floor MISSED: {FLOORS['decode'][0]}: worst 0.850 (decode b), at least 0.88" in lines
    assert f"floor not measured: {FLOORS['swap'][0]} (at least 0.9)" in lines


def test_the_floors_are_those_promised() -> None:
    assert {key: at_least for key, (_, at_least) in FLOORS.items()} == {
        "decode": 0.88,
        "decode small": 0.82,
        "decode mqa": 0.70,
        "paged": 0.97,
        "layers": 0.95,
        "prefill": 0.80,
        "swap": 0.90,
    }


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (AttentionCase(GQA4, 64, 4096), "decode"),
        (AttentionCase(MHA, 64, 1024), "decode"),
        (AttentionCase(GQA4, 64, 1024), "decode small"),
        (AttentionCase(MQA, 64, 16384), "decode mqa"),
        (AttentionCase(MQA, 64, 1024), None),  # 8 us of memory beside 4 of fixed costs
        (AttentionCase(GQA4, 1, 65536), None),  # one sequence waits for latencies, however long it is
        (AttentionCase(GQA4, 64, 4096, kv_dtype="float8_e4m3fn"), None),
    ],
)
def test_each_case_counts_for_the_floor_that_it_can_reach(case: AttentionCase, floor: str | None) -> None:
    assert decode_floor(case) == floor
    assert case in list(decode_cases())
