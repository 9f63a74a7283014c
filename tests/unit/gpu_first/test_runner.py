"""The runner of the first half hour, with processes that stand in for steps."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from gpu_first import page, runner
from gpu_first.parts import SHORT, steps_of
from gpu_first.records import ABSENT, FAILED, LATE, PASSED, Records, of_step, status_of
from gpu_first.rehearsal import SOURCES
from gpu_first.runner import code_digest, copy_results, versions
from support.executor.one_step_part import rehearse, run_with


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "part1.jsonl")


def test_a_step_that_passes_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, run, _ = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert passed
    passed, run, said = run_with(tmp_path, monkeypatch, "sys.exit('not again')")
    assert passed
    assert "going on with" in said
    assert "smallest: passed before" in said
    assert len(of_step(run.records.read(), "smallest", "check")) == 1


def test_the_runner_needs_neither_torch_nor_what_the_wheels_bring() -> None:
    """It installs the wheels itself, and a torch that does not load must cost the steps alone."""
    lacking = "import sys; sys.modules |= dict.fromkeys(('torch', 'grpc_health', 'google.rpc', 'cryptography'))"
    paths = os.pathsep.join(str(runner.ROOT / name) for name in SOURCES)
    command = [sys.executable, "-c", f"{lacking}; import gpu_first.__main__"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


def test_changed_code_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
def test_a_step_that_hangs_is_ended_and_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a child in a group of its own, which holds the other end of the pipe.
    endless = 10**6 + os.getpid()
    child = f"__import__('subprocess').Popen(['sleep', '{endless}'], process_group=0)"
    body = f"log.fact('x', 1)\n{child}\ntime.sleep({endless})"
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    for limit in (4.0, 16.0, 64.0):  # the shorter ones may be too short for a busy machine to find anything
        folder = tmp_path / f"{limit:.0f}"
        folder.mkdir()
        passed, run, said = run_with(folder, monkeypatch, body, step_seconds=limit)
        assert not passed
        assert status_of(run.records.read(), "smallest") == LATE
        assert f"stopped after {limit:.0f} s" in said
        if facts := of_step(run.records.read(), "smallest", "fact"):
            break
    assert len(facts) == 1
    command = f"sleep\0{endless}\0".encode()
    # A process that was killed is there until it has had its turn.
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path) == command]:
        time.sleep(0.05)


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
        (
            "raise RuntimeError('CUDA error: an illegal memory access\\nCompile with `X` to see more.')",
            FAILED,
            "crashed with 1: RuntimeError: CUDA error: an illegal memory access",
        ),
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


def test_a_short_run_takes_the_steps_of_all_parts_in_its_own_order(tmp_path: Path) -> None:
    said, _ = rehearse("--short", "--folder", str(tmp_path), "--seconds", "1").communicate()
    assert re.findall(rf"^-- (\w+): {LATE} .*no time was left", said, re.MULTILINE) == list(SHORT)
    said, _ = rehearse("--short", "--only", "model").communicate()
    assert "--short: not with --only" in said


def test_the_model_stays_until_every_step_that_reads_it_has_passed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for only in (("model",), ()):
        model.mkdir(exist_ok=True)
        (model / "whole").touch()
        run = runner.Run(3, tmp_path, "test GPU", out=io.StringIO(), only=only)
        code = {"code": code_digest(), "services": code_digest(runner.THROUGH_BOTH)}
        run.records.start({"part": 3, "gpu": "test GPU", "versions": versions(), **code})
        run.records.add("model", "fact", name="model", value=str(model))
        for step in steps_of(3) if not only else steps_of(3)[:1]:
            run.records.add(step.name, "end", status=PASSED, reason="", seconds=1.0)
        assert run.all()
        assert model.exists() == bool(only)


def test_a_page_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("rows")

    monkeypatch.setattr(page, "write", fail)
    passed, _, said = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert passed
    assert "the page could not be written: KeyError" in said


def test_a_step_that_was_too_slow_gets_twice_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"part": 1, "gpu": "test GPU", "code": code_digest(), "versions": versions()}
    records = Records(tmp_path / "part1.jsonl")
    records.start(about)
    records.add("smallest", "end", status=LATE, reason="stopped after 60 s", seconds=60.0)
    _, _, said = run_with(tmp_path, monkeypatch, "log.check('x', True)")
    assert "(at most 120 s)" in said


@pytest.mark.long
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = rehearse("1", "--only", "machine", "--folder", str(tmp_path / "file"))
    said, _ = run.communicate()
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


def test_copies_that_end_early_leave_those_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is lent ends a command at its limit, whatever it is doing."""
    folder, copies = tmp_path / "results", tmp_path / "out"
    folder.mkdir()
    for name in ("part1.jsonl", "part1.log"):
        (folder / name).write_text("whole")
    copy_results(folder, copies)
    (folder / "part1.jsonl").write_text("whole again")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for module, call in ((tarfile.TarFile, "add"), (shutil, "copyfile")):
        with monkeypatch.context() as patched:
            patched.setattr(module, call, killed)
            with pytest.raises(KeyboardInterrupt):
                copy_results(folder, copies)
        assert (copies / "part1.jsonl").read_text() == "whole"
        with tarfile.open(copies / "raw.tar.gz") as archive:
            assert set(archive.getnames()) == {"part1.jsonl", "part1.log"}
