"""--record-steps: every call to the scheduler, before it decides anything, and every plan."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import msgpack
import pytest
from support.engine.engine_harness import Bench, command, expect, read, run
from support.engine.step_recordings import EIGHT, RecordedDriver, record_busy_engine, records
from support.waiting import wait_until

from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import COLUMNS, StepRecorder


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A recording of a busy engine."""
    return record_busy_engine(monkeypatch, tmp_path)


def test_every_kind_of_call_is_recorded(recording: Path) -> None:
    header, *found = records(recording)
    assert (header["format"], header["version"], header["eviction_policy"]) == ("pagekv steps", 3, "slru")
    assert {record[0] for record in found} == {
        *("attach", "add", "plan", "commit", "finish", "share", "free", "preempt", "clear")
    }
    assert found[0][0] == "attach"
    assert found[0][1]["num_blocks"] == 20


def test_calls_are_recorded_in_order_and_before_they_decide() -> None:
    driver = RecordedDriver(depth=1)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=3)
    driver.step()
    driver.scheduler.preempt_all()
    driver.abort(request)
    driver.scheduler.clear_prefix_cache()
    driver.step()
    driver.lose_executor()
    _, *found = [msgpack.unpackb(packed) for _, packed in msgpack.Unpacker(BytesIO(driver.memory.content))]
    kinds = ["attach", "add", "plan", "commit", "preempt", "finish", "clear", "plan", "commit", "attach"]
    assert [record[0] for record in found] == kinds
    assert found[1][1] == 0
    # The step that drops the sequence at the executor computes nothing.
    assert (found[7][1][COLUMNS.index("tokens")], found[7][1][COLUMNS.index("preempted")]) == (0, [[0, 0, False]])


def test_an_error_is_recorded_behind_the_call_that_raised_it() -> None:
    driver = RecordedDriver()
    driver.submit([1, 2, 3], max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    result = driver.executor.run(plan)
    with pytest.raises(InvariantError, match="0 tokens of 1 sequences, not 1"):
        driver.scheduler.commit(plan, replace(result, sampled_tokens=[]))
    *_, call, error = [msgpack.unpackb(packed) for _, packed in msgpack.Unpacker(BytesIO(driver.memory.content))]
    assert (call[0], error[0]) == ("commit", "error")
    assert "0 tokens of 1 sequences" in error[1]


def test_a_full_disk_changes_nothing_but_the_recording() -> None:
    file = RecordingFile(Path("/dev/full"), "steps")
    recorder = StepRecorder(file, EngineConfig())

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for number in range(3):
            assert await read(engine.submit(command(f"r{number}", [number, *EIGHT]))) == expect([number, *EIGHT])

    run(body, [recorder])
    wait_until(lambda: file.over)  # the disk's answer comes to the recording's own thread
    file.close()
