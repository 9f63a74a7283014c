"""The page and the JSON of what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_first import page
from gpu_first.parts import steps_of
from gpu_first.records import FAILED, PASSED, Records, StepLog
from support.executor.one_step_part import run_with

from pagekv.kernels.bench.workload import decode_cases, prefill_cases


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "part1.jsonl")


DIES_IN_B = """
for case in "abc":
    if log.begins("decode", case):
        if case == "b":
            __import__("os")._exit(139)
        log.found("decode", {"case": case, "microseconds": 1.0})
sys.exit(1 if log.crashed else 0)
"""


def test_predictions_and_figures_stand_side_by_side(tmp_path: Path) -> None:
    found = Records(tmp_path / "part2.jsonl")
    found.start({"part": 2, "gpu": "test GPU", "code": "abc"})
    log = StepLog(found, "decode_floors")
    row = {"microseconds": 71.0, "share_of_copy": 0.871, "counts_for": {"decode short": 0.871}}
    log.found("decode", {"case": "GQA 4, 64 x 1k", **row})
    StepLog(found, "flashinfer_decode").found("flashinfer decode", {"case": "GQA 4, 64 x 1k", "seconds": 70e-6})
    log.check("wrong", False, error=2.0)
    log.note("GQA 4, 256 x 64k: more than the 72 GiB of memory")
    found.add("decode_floors", "end", status=FAILED, reason="failed: wrong", seconds=3.0)
    page.write(tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert "| GQA 4, 64 x 1k | 83% to 90% | 87.1% | 71.0 | 0.99 |" in text
    assert "- **decode_floors: wrong**: error 2.0" in text
    assert "floor MISSED: the same at 1k" in text
    assert "floor reached: decode of 256 MiB and more, against FlashInfer: worst 0.986" in text
    assert "- decode_floors: GQA 4, 256 x 64k: more than the 72 GiB of memory" in text
    assert "- machine: not begun" in text
    steps = json.loads((tmp_path / page.JSON).read_text())["part 2, kernels"]["steps"]
    assert steps["decode_floors"]["rows"] == [{"section": "decode", "ok": True, "case": "GQA 4, 64 x 1k", **_of(row)}]
    assert steps["prefill"]["status"] == "not begun"


def _of(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "counts_for"}


def test_cases_of_one_name_in_two_sections_are_told_apart() -> None:
    rows: dict[str, list[Any]] = {
        "decode": [{"case": str(case), "microseconds": 100.0, "section": "decode"} for case in decode_cases()],
        "prefill": [{"case": str(case), "microseconds": 10000.0, "section": "prefill"} for case in prefill_cases()],
    }
    names = {row["case"] for row in rows["decode"]} & {row["case"] for row in rows["prefill"]}
    assert "MHA, 1 x 16k" in names
    rows["flashinfer decode"] = [{"case": row["case"], "seconds": 100e-6} for row in rows["decode"]]
    rows["flashinfer prefill"] = [{"case": row["case"], "seconds": 20e-3} for row in rows["prefill"]]
    page.join(rows)
    assert {round(row["against_flashinfer"], 9) for row in rows["decode"]} == {1}
    assert {round(row["against_flashinfer"], 9) for row in rows["prefill"]} == {2}
    assert "against FlashInfer: worst 1.000" in page.floors_text(rows)


def test_what_killed_an_attempt_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = DIES_IN_B.replace('__import__("os")._exit(139)', 'sys.exit("CUDA error: misaligned address")')
    run_with(tmp_path, monkeypatch, body)
    assert "attempt 1 crashed with 1: CUDA error: misaligned address" in (tmp_path / page.PAGE).read_text()
    run_with(tmp_path, monkeypatch, DIES_IN_B.replace('"b":', '"never":'))
    assert "misaligned" not in (tmp_path / page.PAGE).read_text()


def test_what_failed_once_and_passed_later_is_told(tmp_path: Path) -> None:
    found = Records(tmp_path / "part1.jsonl")
    found.start({"part": 1, "gpu": "test GPU", "code": "abc"})
    for passed in (False, True):
        found.add("replays", "attempt", number=0)
        StepLog(found, "replays").check("200 replays", passed, error=float(not passed))
        found.add("replays", "end", status=PASSED if passed else FAILED, reason="", seconds=1.0)
    Records(tmp_path / "part2.jsonl").start({"part": 2, "gpu": "another GPU", "code": "abc"})
    page.write(tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert "1 passed, 0 failed." in text
    assert "replays: 200 replays passed in the last run and **failed in an earlier one**: error 1.0" in text
    assert page.MIXED in text
    assert f"- Part 1, correctness: 1 of {len(steps_of(1))} steps passed. test GPU, code abc." in text
    assert "- Part 3, end to end: not begun." in text
