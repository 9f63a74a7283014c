"""Recordings of steps: of a driver, and of a busy engine."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.engine.engine_harness import Bench, command, config, described, expect, read, run, until
from support.engine.scheduler_driver import Driver
from support.engine.timed_engine import flood, run_timed, submit

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.pins import Pins
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import StepRecorder
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.swapping import SwapPolicy
from pagekv.kvmanager.tenants.accounts import Accounts

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
            config(
                eviction_policy="lru" if share is None else "slru",
                protected_share=share or 0.0,
                priority_aging=self.priority_aging,
            ),
        )
        self.scheduler = Scheduler(self.pool, self.scheduler.limits, self.eos, self.host, self.recorder)
        self.pins = self._new_pins()

    def _new_pins(self) -> Pins:
        return Pins(self.pool, 1.0, pinned=self.recorder.pinned, unpinned=self.recorder.unpinned)

    def _new_pool(self, num_blocks: int) -> None:
        super()._new_pool(num_blocks)
        if hasattr(self, "recorder"):
            self.pins = self._new_pins()


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
        # The stopped one says nothing more.
        for stream in (several, beams, gone):
            await read(stream)
        await read(engine.submit(command("again", EIGHT, 1)))
        pin = engine.queries.pin_prefix(EIGHT, CacheIdentity(), 60)
        assert pin.pinned_tokens == 8
        await read(engine.submit(command("beside", [40, 41, 42], 20)))
        engine.queries.cache.unpin(pin.pin_id)
    stats = engine.statistics.stats()
    assert min(stats.preemptions_total, stats.swapped_out_blocks_total, stats.written_back_blocks_total) > 0


def record_busy_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs a busy engine; returns its recording."""
    file = RecordingFile(tmp_path / "steps", "steps")
    limits = SchedulerLimits(32, 8, 0.0, True, swap=SwapPolicy("swap"), write_back=True)
    recorder = StepRecorder(file, config())

    monkeypatch.setattr("support.engine.engine_harness.DESCRIPTION", described(host_kv_bytes=64))
    run(busy, [recorder], num_device_blocks=20, num_host_blocks=12, limits=limits)
    file.close()
    return file.path


def record_competing_tenants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs an engine in which a quiet tenant comes and goes beside one that floods it, over a lost executor; returns
    its recording.
    """
    file = RecordingFile(tmp_path / "steps", "steps")
    (tmp_path / "tenants.toml").write_text(
        "[default]\n[tenants.quiet]\nweight = 2\nfloor_blocks = 9\nmax_running = 3\n"
    )
    accounts = Accounts(tmp_path / "tenants.toml")

    async def body(engine: EngineLoop, bench: Bench) -> None:
        others = flood(engine, accounts, 40)
        for at in range(12):
            for stream in [submit(engine, accounts, "quiet", f"q{at}-{nth}", [at, *EIGHT, nth], 4) for nth in range(5)]:
                await read(stream)
                engine.release(stream)
            if at == 6:
                assert bench.link is not None
                bench.link.lose()
        for stream in others:
            await read(stream)

    run_timed(monkeypatch, body, accounts, [StepRecorder(file, config())])
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
