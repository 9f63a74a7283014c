"""--record-steps and pagekv replay --steps: what a recording holds leads to the same decisions once more."""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine.engine_harness import DESCRIPTION, Bench, command, config, expect, read, run, until
from support.engine.scheduler_driver import Driver
from support.engine.scheduler_machine import SchedulerMachine

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.pins import Pins
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import COLUMNS, StepRecorder
from pagekv.kvmanager.replay.cli import main as replay
from pagekv.kvmanager.replay.step_replay import StepsError, StepsReport, replay_steps
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

EIGHT = [*range(8)]


class Memory:
    """In place of a RecordingFile."""

    over = False

    def __init__(self) -> None:
        self.content = b""

    def write(self, record: bytes, size: int) -> None:
        assert len(record) == size
        self.content += record


class RecordedDriver(Driver):
    """The real scheduler and fake executor, recorded."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.memory = Memory()
        share = self.protected_share
        self.recorder = StepRecorder(
            self.memory,  # type: ignore[arg-type]  # as much of a file as is used
            eviction_policy="lru" if share is None else "slru",
            protected_share=share or 0.0,
            aging=self.priority_aging,
        )
        self.scheduler = Scheduler(self.pool, self.scheduler.limits, self.eos, self.host, self.recorder)
        self.pins = self._new_pins()

    def _new_pins(self) -> Pins:
        return Pins(self.pool, 1.0, pinned=self.recorder.pinned, unpinned=self.recorder.unpinned)

    def _new_pool(self, num_blocks: int) -> None:
        super()._new_pool(num_blocks)
        if hasattr(self, "recorder"):
            self.pins = self._new_pins()


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


async def busy(engine: EngineLoop, bench: Bench) -> None:
    """Preemption by swap, write-back, beams, n, aborts, a stop string, pins, a forced reset and a lost executor."""
    bench.step_s = 0.001
    for part in range(2):
        prompts = [[i % 5, *EIGHT, i] for i in range(8)]
        streams = [engine.submit(command(f"{part}-{i}", prompt, 12)) for i, prompt in enumerate(prompts)]
        several = engine.submit(command(f"{part}-n", [9, 9, part], 6, n=3))
        sampling = SamplingParams(max_tokens=6, beam_width=3)
        beams = engine.submit(GenerateCommand(f"{part}-beams", [7, 7, part], sampling, 2))
        gone = engine.submit(command(f"{part}-gone", [3, 1], 30))
        stopped = engine.submit(command(f"{part}-stopped", [3, 2], 30, n=2))
        enough = len(bench.plans) + 15
        while len(bench.plans) < enough:  # noqa: ASYNC110  # looks at every turn of the loop
            await asyncio.sleep(0)
        engine.abort(f"{part}-gone")
        engine.finish_sequence(stopped, 1)
        if part:
            assert bench.link is not None
            bench.link.lose()
            await until(lambda: len(bench.attaches) == 2)
        else:
            engine.queries.reset_prefix_cache(force=True)
        engine.abort(f"{part}-stopped")
        assert [await read(stream) for stream in streams] == [expect(prompt, 12) for prompt in prompts]
        # Of the stopped one nothing more is told.
        for stream in (several, beams, gone):
            await read(stream)
        await read(engine.submit(command("again", EIGHT, 1)))
        pin = engine.queries.pin_prefix(EIGHT, CacheIdentity(), 60)
        assert pin.pinned_tokens == 8
        await read(engine.submit(command("beside", [40, 41, 42], 20)))
        engine.queries.unpin_prefix(pin.pin_id)
    stats = engine.queries.stats()
    assert min(stats.preemptions_total, stats.swapped_out_blocks_total, stats.written_back_blocks_total) > 0


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of a busy engine."""
    file = RecordingFile(tmp_path / "steps", "steps")
    limits = SchedulerLimits(32, 8, 0.0, True, swap=SwapPolicy("swap"), write_back=True)
    assert config().eviction_policy == "slru"
    recorder = StepRecorder(file, eviction_policy="slru", protected_share=config().protected_share, aging=256)
    assert config().priority_aging == 256

    class Recorded(EngineLoop):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            self.observers.add(recorder)

    monkeypatch.setattr("support.engine.engine_harness.EngineLoop", Recorded)
    monkeypatch.setattr("support.engine.engine_harness.DESCRIPTION", replace(DESCRIPTION, host_kv_bytes=64))
    run(monkeypatch, busy, num_device_blocks=20, num_host_blocks=12, limits=limits)
    file.close()
    return file.path


def records(path: Path) -> list[Any]:
    return [msgpack.unpackb(packed) for _, packed in msgpack.Unpacker(path.open("rb"))]


def write(path: Path, found: list[Any]) -> None:
    """With checks that are right."""
    check, content = 0, b""
    for record in found:
        packed = msgpack.packb(record)
        check = zlib.crc32(packed, check)
        content += msgpack.packb([check, packed])
    path.write_bytes(content)


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
        r"[\d,]+ steps for 28 requests in 2 epochs, with \d+ preemptions: every decision was derived again, and is the "
        r"same\n",
        out,
    )
    assert replay(["--steps", str(recording), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == report.steps


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
    with pytest.raises(StepsError, match=r"after step [1-9]\d*: (the recording was changed|not a recording|a record)"):
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
    ],
)
def test_other_files_are_refused(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert replay(["--steps", str(path)]) == 1
    assert words in capsys.readouterr().err
    assert replay(["--steps", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_either_a_trace_or_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["trace", "--steps", "file"]):
        with pytest.raises(SystemExit) as ended:
            replay(argv)
        assert ended.value.code == 2
        assert "give either a TRACE or --steps FILE" in capsys.readouterr().err


def test_a_broken_invariant_happens_again(tmp_path: Path) -> None:
    """What a bug report is for."""
    driver = RecordedDriver()
    driver.submit([1, 2, 3], max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    outcome = driver.executor.run(plan)
    with pytest.raises(InvariantError, match="sampled other sequences"):
        driver.scheduler.commit(plan, replace(outcome, sampled_seq_ids=[77]))
    driver.lose_executor()
    driver.drain()
    path = tmp_path / "steps"
    path.write_bytes(driver.memory.content)
    assert replay_steps(path) == StepsReport(steps=len(driver.plans), requests=1, epochs=2)
    found = [record for record in records(path) if not (isinstance(record, list) and record[0] == "error")]
    write(path, found)
    with pytest.raises(StepsError, match=r"after step 1: broken invariant, which it was not before: .*sampled other"):
        replay_steps(path)


def test_a_full_disk_changes_nothing_but_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordingFile(Path("/dev/full"), "steps")
    recorder = StepRecorder(file, eviction_policy="slru", protected_share=0.2, aging=256)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for number in range(3):
            assert await read(engine.submit(command(f"r{number}", [number, *EIGHT]))) == expect([number, *EIGHT])

    class Recorded(EngineLoop):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            self.observers.add(recorder)

    monkeypatch.setattr("support.engine.engine_harness.EngineLoop", Recorded)
    run(monkeypatch, body)
    deadline = time.monotonic() + 10
    while not file.over and time.monotonic() < deadline:
        time.sleep(0.01)  # the disk's answer comes to the recording's own thread
    assert file.over
    file.close()
