"""The first half hour on a GPU: records that survive, steps that cost no other, a page of what was found."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_first import __main__ as command
from gpu_first import page, tools
from gpu_first.parts import PART_SECONDS, PARTS, STEPS, steps_of
from gpu_first.records import ABSENT, FAILED, LATE, PASSED, Records, StepLog, of_step, status_of
from gpu_first.rehearsal import NCU, SOURCES, Stage, failing, faults_of, without_tools
from gpu_first.runner import ROOT, STEP_OF, Run, code_digest, versions
from gpu_first.step import FAIL, FAULTS, REHEARSAL

from pagekv.kernels.bench.workload import decode_cases, prefill_cases

# --- records


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


# --- the table


def test_parts_take_at_most_nine_minutes_and_say_what_matters_first() -> None:
    assert PART_SECONDS == 540
    assert [steps_of(part)[0].name for part in PARTS] == ["machine", "decode_floors", "model"]
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert all(step.seconds < PART_SECONDS for step in STEPS)


def test_every_step_of_the_table_exists_and_is_made_to_fail() -> None:
    from gpu_first.step import function_of

    assert all(callable(function_of(step.name)) for step in STEPS)
    for part in PARTS:
        faults = faults_of(part)
        assert list(faults) == [step.name for step in steps_of(part)]
        assert set(faults.values()) == set(FAULTS)


# --- the runner, with processes that stand in for steps

SCRIPT = """
import sys, time
sys.path.insert(0, {path!r})
from gpu_first.records import Records, StepLog
name, records = sys.argv[1], Records(__import__("pathlib").Path(sys.argv[2]))
log = StepLog(records, name)
{body}
"""


def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, **options: Any) -> tuple[bool, Run, str]:
    """A part of one step, whose process is this text."""
    script = tmp_path / "step.py"
    script.write_text(SCRIPT.format(path=str(Path(tools.__file__).parents[1]), body=body))

    def command_of(name: str, *args: str) -> list[str]:
        return [sys.executable, str(script), name, args[args.index("--records") + 1]]

    monkeypatch.setattr(tools, "step_command", command_of)
    said = io.StringIO()
    run = Run(1, tmp_path, "test GPU", out=said, only=("smallest",), **options)
    run.all()
    return status_of(run.records.read(), "smallest") == PASSED, run, said.getvalue()


def test_a_step_that_passes_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, run, _ = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert passed
    passed, run, said = run_with(tmp_path, monkeypatch, "sys.exit('not again')")
    assert passed
    assert "going on with" in said
    assert "smallest: passed before" in said
    assert len(of_step(run.records.read(), "smallest", "check")) == 1


def test_changed_code_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_first import runner

    run_with(tmp_path, monkeypatch, "log.check('x', True)")
    monkeypatch.setattr(runner, "code_digest", lambda *folders: "another")
    passed, run, _ = run_with(tmp_path, monkeypatch, "sys.exit(1)")
    assert not passed
    assert of_step(run.records.read(), "smallest", "check") == []


def test_the_digest_is_of_the_code_that_is_measured(tmp_path: Path) -> None:
    for name in ("kernels/pagekv/kernels/bench/a.py", "kernels/pagekv/kernels/b.py", "executor/pagekv/executor/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_digest(root=tmp_path)
    (tmp_path / "kernels/pagekv/kernels/bench/a.py").write_text("2")
    assert code_digest(root=tmp_path) == before
    (tmp_path / "kernels/pagekv/kernels/b.py").write_text("2")
    assert code_digest(root=tmp_path) != before


DIES_IN_B = """
for case in "abc":
    if log.begins("decode", case):
        if case == "b":
            __import__("os")._exit(139)
        log.found("decode", {"case": case, "microseconds": 1.0})
sys.exit(1 if log.crashed else 0)
"""


def test_a_crash_costs_the_case_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, run, said = run_with(tmp_path, monkeypatch, DIES_IN_B)
    assert not passed
    assert [row["case"] for row in of_step(run.records.read(), "smallest", "row")] == ["a", "c"]
    assert "part 1: " in said
    passed, run, _ = run_with(tmp_path, monkeypatch, DIES_IN_B.replace('"b":', '"never":'))
    assert passed
    assert [row["case"] for row in of_step(run.records.read(), "smallest", "row")] == ["a", "c", "b"]


def test_a_step_that_hangs_is_ended_and_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a child in a group of its own, which holds the other end of the pipe.
    child = "__import__('subprocess').Popen(['sleep', '617'], process_group=0)"
    body = f"log.fact('x', 1)\n{child}\ntime.sleep(600)"
    from gpu_first import runner

    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    passed, run, said = run_with(tmp_path, monkeypatch, body, step_seconds=4.0)
    assert not passed
    assert status_of(run.records.read(), "smallest") == LATE
    assert len(of_step(run.records.read(), "smallest", "fact")) == 1
    assert "stopped after 4 s" in said
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path) == b"sleep\x00617\x00"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_nothing_is_begun_when_the_parts_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, run, said = run_with(tmp_path, monkeypatch, "log.check('x', True)", seconds=5.0)
    assert not passed
    assert of_step(run.records.read(), "smallest", "attempt") == []
    assert "no time was left to begin it" in said


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("print('failed: x'); sys.exit(1)", FAILED, "failed: x"),
        ("print('absent: ncu'); sys.exit(3)", ABSENT, "absent: ncu"),
        ("print('out of time: decode x'); sys.exit(4)", LATE, "out of time: decode x"),
        ("import no_such_module", FAILED, "No module named 'no_such_module'"),
    ],
)
def test_every_end_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, reason: str
) -> None:
    _, run, said = run_with(tmp_path, monkeypatch, body)
    (end,) = of_step(run.records.read(), "smallest", "end")
    assert end["status"] == status
    assert reason in end["reason"]
    assert "part 1: " in said


def test_a_page_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("rows")

    monkeypatch.setattr(page, "write", fail)
    passed, _, said = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert passed
    assert "the page could not be written: KeyError" in said


# --- page and JSON


def test_predictions_and_figures_stand_side_by_side(tmp_path: Path) -> None:
    found = Records(tmp_path / "part2.jsonl")
    found.start({"part": 2, "gpu": "test GPU", "code": "abc"})
    log = StepLog(found, "decode_floors")
    row = {"microseconds": 71.0, "share_of_copy": 0.871, "counts_for": {"decode small": 0.871}}
    log.found("decode", {"case": "GQA 4, 64 x 1k", **row})
    StepLog(found, "flashinfer_decode").found("flashinfer decode", {"case": "GQA 4, 64 x 1k", "seconds": 70e-6})
    log.check("wrong", False, error=2.0)
    log.note("GQA 4, 256 x 64k: more than the 72 GiB of memory")
    found.add("decode_floors", "end", status=FAILED, reason="failed: wrong", seconds=3.0)
    page.write(tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert "| GQA 4, 64 x 1k | 83% to 90% | 87.1% | 71.0 | 0.99 |" in text
    assert "- **decode_floors: wrong**: error 2.0" in text
    assert "floor reached: decode of 64 and more, 256 MiB to 1 GiB" in text
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
        "decode": [{"case": case.name, "microseconds": 100.0, "section": "decode"} for case in decode_cases()],
        "prefill": [{"case": case.name, "milliseconds": 10.0, "section": "prefill"} for case in prefill_cases()],
    }
    names = {row["case"] for row in rows["decode"]} & {row["case"] for row in rows["prefill"]}
    assert "MHA, 1 x 16k" in names
    rows["flashinfer decode"] = [{"case": row["case"], "seconds": 100e-6} for row in rows["decode"]]
    rows["flashinfer prefill"] = [{"case": row["case"], "seconds": 20e-3} for row in rows["prefill"]]
    page.join(rows)
    assert {round(row["against_flashinfer"], 9) for row in rows["decode"]} == {1}
    assert {round(row["against_flashinfer"], 9) for row in rows["prefill"]} == {2}
    assert all("counts_for" in row for row in rows["decode"] if row["case"] == "MHA, 64 x 1k")


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
    assert "- Part 1, correctness: 1 of 9 steps passed. test GPU, code abc." in text
    assert "- Part 3, end to end: not begun." in text


def test_a_step_that_was_too_slow_gets_twice_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"part": 1, "gpu": "test GPU", "code": code_digest(), "versions": versions()}
    records = Records(tmp_path / "part1.jsonl")
    records.start(about)
    records.add("smallest", "end", status=LATE, reason="stopped after 60 s", seconds=60.0)
    _, _, said = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert "(at most 120 s)" in said


# --- tools


def test_ncus_table_is_read() -> None:
    lines = NCU.partition("exec >&3\n")[2]
    text = subprocess.run(["sh", "-c", lines], capture_output=True, text=True, check=True).stdout
    launches = tools.launches_of("what the program said\n" + text)
    assert len(launches) == 3
    assert launches[0]["gpu__time_duration.sum"] == "71.2 us"
    assert launches[0]["Kernel Name"] == "pagekv_decode"
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        tools.launches_of("==ERROR== ERR_NVGPUCTRPERM: no permission")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no nvidia-smi"),
        ("echo No devices were found; exit 6", "nvidia-smi says: No devices were found"),
        ("exit 0", "nvidia-smi says: nothing"),
        ("echo H200; exit 0", "there is no NVIDIA driver"),  # what it says is not taken on trust
    ],
)
def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert command.main(["1", "--folder", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {said}")
    assert "compute capability 8.0" in err


def rehearse(*words: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in SOURCES)
    variables = {**os.environ, REHEARSAL: "1", "PYTHONPATH": paths, **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_first", *words],
        env=variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_nothing_runs_on_when_the_runner_is_killed_and_no_two_runs_share_a_folder(tmp_path: Path) -> None:
    run = rehearse("1", "--only", "machine", "--folder", str(tmp_path), **{FAIL: "machine=hang"})
    deadline = time.monotonic() + 90
    while not (steps := _steps_of(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other = rehearse("1", "--folder", str(tmp_path))
    said, _ = other.communicate(timeout=90)
    assert (other.returncode, said) == (2, f"error: another run is under way in {tmp_path}\n")
    run.kill()
    run.communicate(timeout=30)
    while _steps_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert steps


def _steps_of(folder: Path) -> list[Path]:
    mark = f"{STEP_OF}={folder}".encode()
    return [path for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path).split(b"\0")]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = rehearse("1", "--only", "machine", "--folder", str(tmp_path / "file"))
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "choose another --folder" in said


def test_results_are_copied_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ncu.csv").write_text("raw")
    run_with(tmp_path, monkeypatch, "log.check('x', True); print('said')", copies=tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [page.JSON, page.PAGE, "part1.jsonl", "raw.tar.gz"]
    with tarfile.open(tmp_path / "out" / "raw.tar.gz") as archive:
        assert set(archive.getnames()) == {"ncu.csv", "part1.jsonl", "part1.log"}


# --- the rehearsal, in small: real steps over the emulated kernels


@pytest.mark.long
def test_a_rehearsal_in_small(tmp_path: Path) -> None:
    """An import, a fault of the device and a hang, then the same command again; and tools that are missing."""
    stage = Stage(tmp_path)
    faults = {"machine": "import", "smallest": "fault", "swap": "hang"}
    assert failing(1, faults, stage) == []
    assert (tmp_path / "failing-1" / page.PAGE).read_text().startswith("# The first half hour on a GPU")
    assert without_tools(2, stage) == []
