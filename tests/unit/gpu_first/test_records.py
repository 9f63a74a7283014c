"""Records of the first half hour: a step that dies costs no other, and nothing that was found is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_first.records import Records, StepLog


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "part1.jsonl")


def test_a_line_that_was_cut_off_costs_no_other(records: Records) -> None:
    records.add("a", "fact", name="x", value=1)
    with records.path.open("a") as file:
        file.write('{"step": "a", "kind": "fa')
    records.add("a", "fact", name="y", value=2)
    assert [record["name"] for record in records.read()] == ["x", "y"]


def test_a_file_about_something_else_is_begun_anew_and_kept(records: Records) -> None:
    assert records.start({"gpu": "one"}) is False
    assert records.start({"gpu": "one"}) is True
    assert records.start({"gpu": "two"}) is False
    assert [record["about"] for record in records.read()] == [{"gpu": "two"}]
    assert len(list(records.path.parent.glob("part1.*.old"))) == 1


def test_lines_that_lack_what_they_need_cost_no_other(records: Records) -> None:
    garbage = [b'{"a": 1}', b"\xff\xfe", b'{"step": "s", "kind": "end"}', b'{"step": "", "kind": "about"}', b"[1]"]
    records.path.write_bytes(b"\n".join([*garbage, b'{"step": "s", "kind": []}', b""]))
    records.add("s", "fact", name="x", value=1)
    assert [record["name"] for record in records.read()] == ["x"]
    assert records.start({"gpu": "one"}) is False


def test_an_attempt_goes_on_behind_the_case_that_the_one_before_died_in(records: Records) -> None:
    records.add("s", "attempt", number=0)
    first = StepLog(records, "s")
    for case in ("a", "b"):
        assert first.begins("decode", case)
    first.found("decode", {"case": "a"})
    records.add("s", "attempt", number=1)
    second = StepLog(records, "s")
    assert [second.begins("decode", case) for case in ("a", "b", "c")] == [False, False, True]
    assert second.crashed == [("decode", "b")]


def test_a_new_run_tries_again_what_died_and_what_failed_and_keeps_the_rest(records: Records) -> None:
    records.add("s", "attempt", number=0)
    log = StepLog(records, "s")
    for case, passed in (("a", True), ("b", False)):
        log.begins("correctness", case)
        log.found("correctness", {"case": case, "checks": [{"name": case, "passed": passed, "error": 1.0}]})
    log.begins("correctness", "c")
    assert log.failed == ["b"]
    records.add("s", "attempt", number=0)
    again = StepLog(records, "s")
    assert [again.begins("correctness", case) for case in ("a", "b", "c")] == [False, True, True]
    assert (again.failed, again.crashed) == ([], [])
