"""The bench's report: tables, the page."""

from __future__ import annotations

from typing import Any

from pagekv.kernels.bench.report import table, text


def test_tables_align_and_leave_out_what_nobody_has() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "MHA, 1 x 256", "microseconds": 12.34, "gb_per_s": 345.6, "share_of_copy": 0.1234},
        {"case": "MHA, 256 x 64k", "microseconds": None, "gb_per_s": 4000.0, "share_of_copy": 0.9},
    ]
    assert table("decode", rows).splitlines() == [
        "decode                                              us  of copy   GB/s",
        "MHA, 1 x 256                                      12.3    12.3%    346",
        "MHA, 256 x 64k                                       -    90.0%   4000",
    ]


def test_a_page_of_correctness_alone_has_no_figures() -> None:
    page = text({"machine": {"gpu": "H200", "arch": "sm_90"}, "notes": ["x: no time was left"], "seconds": 12.0})
    assert page == "gpu H200, arch sm_90\n\nnot measured: x: no time was left\n\ntook 12 s"
