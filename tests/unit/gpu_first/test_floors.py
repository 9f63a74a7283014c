"""Floors: which case counts for which, and the verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_first.floors import EACH, FLOORS, MEAN, decode_floor, flashinfer_floors, verdict_line, verdicts
from gpu_first.in_process import Sizes

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
    assert f"floor MISSED: {FLOORS['decode'][0]}: worst 0.850 (decode b), at least 0.92" in lines
    assert f"floor not measured: {FLOORS['swap'][0]} (at least 0.9)" in lines


def test_the_floors_are_those_promised() -> None:
    assert {key: at_least for key, (_, at_least) in FLOORS.items()} == {
        "decode": 0.92,
        "decode short": 0.88,
        "decode mqa": 0.85,
        "decode fp8": 0.85,
        "paged": 0.97,
        "layers": 0.97,
        "prefill": 0.90,
        "swap": 0.90,
        "batch 1, greedy": 210,
        "batch 32, greedy": 6_000,
        "batch 256, greedy": 26_000,
        "batch 256, top-p": 24_000,
        "31 decodes beside a chunk of 512": 1000 / 12,
    }
    assert [EACH[1], MEAN[1]] == [0.95, 1.0]
    # The keys of end-to-end figures are the cases of their rows.
    sizes = Sizes()
    cases = {f"batch {batch}, {kind}" for batch in sizes.batches for kind in ("greedy", "top-p")}
    cases |= {f"{batch - 1} decodes beside a chunk of {sizes.chunk}" for batch in sizes.batches}
    assert set(list(FLOORS)[-5:]) <= cases


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (AttentionCase(GQA4, 64, 4096), "decode"),
        (AttentionCase(MHA, 64, 1024), "decode short"),
        (AttentionCase(GQA4, 64, 1024), "decode short"),
        (AttentionCase(MQA, 64, 16384), "decode mqa"),
        (AttentionCase(MQA, 64, 1024), None),  # 8 us of memory beside 4 of fixed costs
        (AttentionCase(GQA4, 1, 65536), None),  # one sequence waits for latencies, however long it is
        (AttentionCase(GQA4, 64, 4096, kv_dtype="float8_e4m3fn"), None),
    ],
)
def test_each_case_counts_for_the_floor_that_it_can_reach(case: AttentionCase, floor: str | None) -> None:
    assert decode_floor(case) == floor
    assert case in list(decode_cases())


def test_floors_against_flashinfer_are_of_decodes_that_are_large_enough() -> None:
    names = {
        str(AttentionCase(GQA4, 64, 1024)): 0.98,
        str(AttentionCase(MHA, 64, 1024)): 1.1,
        str(AttentionCase(MHA, 1, 256)): 0.1,
    }
    rows: list[dict[str, Any]] = [{"case": name, "against_flashinfer": ratio} for name, ratio in names.items()]
    each, mean = flashinfer_floors([*rows, {"case": "GQA 8, 64 x 4k"}])
    assert (each["worst"], each["case"], each["reached"]) == (0.98, "decode GQA 4, 64 x 1k", True)
    assert mean["worst"] == pytest.approx((0.98 * 1.1) ** 0.5)


def test_without_figures_floors_against_flashinfer_are_not_measured() -> None:
    assert [verdict["reached"] for verdict in flashinfer_floors([])] == [None, None]
