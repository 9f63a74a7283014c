"""Totals that the engine loop keeps."""

from __future__ import annotations

from dataclasses import replace

from support.engine.engine_harness import Bench, command, read, run, until
from support.event_loop import run_by

from pagekv.kvmanager.engine.loop import EngineLoop


@run_by(run)
async def test_threads_are_those_of_the_latest_step(engine: EngineLoop, bench: Bench) -> None:
    assert engine.statistics.stats().executor_threads == 0
    bench.bend = lambda result: replace(result, threads=result.step)
    await read(engine.submit(command("r", [1, 2, 3])))
    await until(lambda: engine.statistics.stats().steps_total == 7)
    assert engine.statistics.stats().executor_threads == 7


@run_by(run)
async def test_idle_time_counts_only_while_there_is_work(engine: EngineLoop, bench: Bench) -> None:
    bench.bend = lambda result: replace(result, idle_us=1000)
    for count in (1, 2):
        await read(engine.submit(command(f"r{count}", [count, 2, 3])))
        # Of a request's six steps all but the first; that its sequence leaves takes one more, with nothing to do.
        await until(lambda count=count: engine.statistics.stats().steps_total == 7 * count)  # type: ignore[misc]  # a lambda with a default
        assert engine.statistics.stats().executor_idle_us_total == 5 * 1000 * count
