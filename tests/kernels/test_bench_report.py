"""The bench's report: verdicts on floors, tables, JSON."""

from __future__ import annotations

import json
from typing import Any

from pagekv.kernels.bench.report import COLUMNS, BenchReport, table
from pagekv.kernels.bench.workload import (
    FLOORS,
)


def test_floors_take_the_worst_case_and_say_what_was_not_measured() -> None:
    report = BenchReport({"gpu": "H200"})
    report.sections["decode"] = [
        {"case": "a", "counts_for": {"decode": 0.95, "paged": 0.99}},
        {"case": "b", "counts_for": {"decode": 0.85, "paged": 0.98}},
        {"case": "c", "counts_for": {"decode": None}},
    ]
    found = dict(zip(FLOORS, report.floors(), strict=True))
    decode, paging = found["decode"], found["paged"]
    assert (decode.worst, decode.case, decode.reached) == (0.85, "decode b", False)
    assert (paging.worst, paging.reached) == (0.98, True)
    assert (found["swap"].worst, found["swap"].reached) == (None, None)
    text = report.text()
    assert f"floor MISSED: {FLOORS['decode'].name}: worst 0.850 (decode b), at least 0.88" in text
    assert f"floor not measured: {FLOORS['swap'].name} (at least 0.9)" in text


def test_tables_align_and_leave_out_what_nobody_has() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "MHA, 1 x 256", "microseconds": 12.34, "gb_per_s": 345.6, "share_of_copy": 0.1234},
        {"case": "MHA, 256 x 64k", "microseconds": None, "gb_per_s": 4000.0, "share_of_copy": 0.9},
    ]
    lines = table(COLUMNS["decode"], rows).splitlines()
    assert lines == [
        "decode                                  us   GB/s  of copy",
        "MHA, 1 x 256                          12.3    346    12.3%",
        "MHA, 256 x 64k                           -   4000    90.0%",
    ]


def test_json_holds_every_row_and_floor() -> None:
    report = BenchReport({"gpu": "H200"}, copy_gb_per_s=4000.0)
    report.sections["swap"] = [{"case": "a", "out_gb_per_s": 50.0, "counts_for": {"swap": 0.95}}]
    found = json.loads(report.to_json())
    assert found["swap"] == [{"case": "a", "out_gb_per_s": 50.0}]
    assert [row["reached"] for row in found["floors"]] == [None] * 6 + [True]
