"""pagekv replay --steps: what a recording holds leads to the same decisions once more."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine.scheduler_machine import SchedulerMachine
from support.engine.step_recordings import (
    RecordedDriver,
    record_busy_engine,
    record_competing_tenants,
    records,
    write,
)

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.observe.recording.step_recorder import COLUMNS, numbers
from pagekv.kvmanager.replay.cli import main as replay
from pagekv.kvmanager.replay.step_replay import StepsError, StepsReport, replay_steps


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A recording of a busy engine."""
    return record_busy_engine(monkeypatch, tmp_path)


class RecordedMachine(SchedulerMachine):
    """Random histories of everything that can happen to a scheduler."""

    DRIVER = RecordedDriver
    # Where `teardown` leaves the recording to be read.
    file: Path

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            driver = self.driver
            assert isinstance(driver, RecordedDriver)
            self.file.write_bytes(driver.memory.content)
            report = replay_steps(self.file)
            assert (report.steps, report.requests) == (len(driver.plans), len(driver.requests))
            assert report.complete


def test_every_random_history_is_derived_again(tmp_path: Path) -> None:
    RecordedMachine.file = tmp_path / "steps"
    run_state_machine_as_test(
        RecordedMachine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )


def rewrite(path: Path, change: Callable[[list[Any]], None]) -> int:
    """Changes the first plan that has appended blocks and makes the checks right again; the number of its step."""
    found = records(path)
    plans = [record for record in found if isinstance(record, list) and record[0] == "plan" and record[1]]
    step = next(number for number, record in enumerate(plans, 1) if record[1][4])
    change(plans[step - 1])
    write(path, found)
    return step


def test_a_recording_is_derived_again(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs with everything in them."""
    report = replay_steps(recording)
    assert (report.epochs, report.requests, report.complete) == (2, 28, True)
    assert min(report.steps, report.preemptions) > 0
    kinds = {record[0] for record in records(recording)[1:]}
    assert kinds == {"attach", "add", "plan", "commit", "finish", "share", "free", "preempt", "clear"}
    assert replay(["--steps", str(recording)]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"[\d,]+ steps for 28 requests in 2 epochs, with \d+ preemptions?: every decision was derived again and is the "
        r"same\n",
        out,
    )
    assert replay(["--steps", str(recording), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == report.steps


def test_what_was_recorded_while_tenants_compete_is_derived_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bounds that were learnt from times, and the tenants that short steps linger for, are in the recording."""
    recording = record_competing_tenants(monkeypatch, tmp_path)
    report, found = replay_steps(recording), records(recording)
    assert (report.epochs, report.requests, report.complete) == (2, 84, True)
    assert {"tenants", "bound"} < {record[0] for record in found[1:]}
    column = COLUMNS.index("tokens of the scheduled")
    plans = [record[1] for record in found[1:] if record[0] == "plan" and record[1]]
    assert any(0 in numbers(plan[column]) for plan in plans)
    for kind in ("tenants", "bound"):
        write(recording, [found[0], *(record for record in found[1:] if record[0] != kind)])
        with pytest.raises(StepsError, match="step"):
            replay_steps(recording)


def test_a_recording_of_another_version_is_refused_by_its_version(recording: Path) -> None:
    header, *rest = records(recording)
    write(recording, [{**header, "version": 2}, *rest])
    with pytest.raises(StepsError, match="a recording of version 2, this is version 3"):
        replay_steps(recording)


def test_another_decision_is_reported_with_its_step_and_column(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(plan: list[Any]) -> None:
        first = int.from_bytes(plan[1][4][:4], "little")
        plan[1][4] = (first + 1).to_bytes(4, "little") + plan[1][4][4:]

    step = rewrite(recording, change)
    assert replay(["--steps", str(recording)]) == 1
    assert re.fullmatch(
        rf"pagekv replay: {recording}: step {step}: appended blocks: recorded \[\d.*\], derived \[\d.*\]\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_is_compared(recording: Path, name: str) -> None:
    column = COLUMNS.index(name)

    def change(plan: list[Any]) -> None:
        value = plan[1][column]
        plan[1][column] = value + 1 if isinstance(value, int) else value + type(value)([1, 2, 3, 4])

    step = rewrite(recording, change)
    with pytest.raises(StepsError, match=f"step {step}: {name}: recorded "):
        replay_steps(recording)


def test_changed_bytes_are_noticed_where_they_are(recording: Path) -> None:
    content = bytearray(recording.read_bytes())
    at = len(content) // 2
    content[at] ^= 1
    recording.write_bytes(bytes(content))
    with pytest.raises(StepsError, match=r"after step [1-9]\d*: (the recording was changed|damaged at byte|record)"):
        replay_steps(recording)


@pytest.mark.parametrize("kind", ["add", "finish", "clear", "share", "attach"])
def test_what_is_left_out_leads_elsewhere(recording: Path, kind: str) -> None:
    found = records(recording)
    del found[[record[0] if isinstance(record, list) else "" for record in found].index(kind)]
    write(recording, found)
    with pytest.raises(StepsError, match="step"):
        replay_steps(recording)


def test_a_recording_that_breaks_off_is_derived_as_far_as_it_goes(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manager that was killed, or a disk that was full."""
    whole = replay_steps(recording)
    content = recording.read_bytes()
    recording.write_bytes(content[: len(content) // 2])
    report = replay_steps(recording)
    assert 0 < report.steps < whole.steps
    assert not report.complete
    assert replay(["--steps", str(recording)]) == 0
    assert "breaks off in the middle of a record" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no records"),
        (b'{"timestamp": 0}\n', "not a recording of steps"),
        (msgpack.packb([zlib.crc32(b"\x01"), b"\x01"]), "not a recording of steps"),
        (msgpack.packb([0, b"\x01"]), "changed or damaged"),
        (msgpack.packb([0, 1]), "not a recording of steps"),
    ],
)
def test_other_files_are_refused(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert replay(["--steps", str(path)]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert "Error" not in err
    assert replay(["--steps", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_record_that_makes_no_sense_is_named_and_so_is_the_place_of_bytes_that_are_none(recording: Path) -> None:
    found = records(recording)
    write(recording, [*found[:3], ["plan", 7, 8]])
    with pytest.raises(StepsError, match=r"before the first step: record 4 \('plan'\): makes no sense: "):
        replay_steps(recording)
    write(recording, found[:2])
    size = recording.stat().st_size
    with recording.open("ab") as file:
        file.write(b"\x07")
    with pytest.raises(StepsError, match=f"before the first step: damaged at byte {size}$"):
        replay_steps(recording)
    # A record of bytes that are none, with the right check.
    recording.write_bytes(msgpack.packb([zlib.crc32(b"\xc1"), b"\xc1"]))
    with pytest.raises(StepsError, match=r"not a recording of steps$"):
        replay_steps(recording)


def test_either_a_trace_or_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["trace", "--steps", "file"]):
        with pytest.raises(SystemExit) as ended:
            replay(argv)
        assert ended.value.code == 2
        assert "give either a TRACE or --steps FILE" in capsys.readouterr().err


def test_a_broken_invariant_happens_again(tmp_path: Path) -> None:
    """The purpose of a bug report."""
    driver = RecordedDriver()
    driver.submit([1, 2, 3], max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    result = driver.executor.run(plan)
    with pytest.raises(InvariantError, match="0 tokens of 1 sequences, not 1"):
        driver.scheduler.commit(plan, replace(result, sampled_tokens=[]))
    driver.lose_executor()
    driver.drain()
    path = tmp_path / "steps"
    path.write_bytes(driver.memory.content)
    assert replay_steps(path) == StepsReport(steps=len(driver.plans), requests=1, epochs=2)
    found = [record for record in records(path) if not (isinstance(record, list) and record[0] == "error")]
    write(path, found)
    with pytest.raises(StepsError, match=r"after step 1: broken invariant, which it was not before: .*0 tokens of 1"):
        replay_steps(path)
