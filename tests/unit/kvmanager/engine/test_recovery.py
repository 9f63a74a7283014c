"""DESIGN 7: a step that fails again and again ends its requests, and nobody else's; one that gets on is never ended."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import Bench, command, expect, read, run, until
from support.event_loop import run_by

from pagekv.common.errors import ComputationFailed
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.recovery import (
    MOST_ROOM_REFUSALS,
    RECONNECT_FIRST_S,
    RECONNECT_LAST_S,
    UNREACHABLE_S,
    Fault,
    Reconnect,
    RoomRefusals,
)
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits

POISON = [9, 9, 9]


@run_by(run)
async def test_a_request_whose_step_always_fails_is_given_up_and_others_finish(
    engine: EngineLoop, bench: Bench
) -> None:
    bench.poison = {tuple(POISON): Fault.STEP}
    bad = engine.submit(command("bad", POISON))
    with pytest.raises(ComputationFailed, match="'bad' could not be computed: its step failed 3 times"):
        await bad.take()
    assert await engine.snapshots.block_tables("bad") is None
    # The first attachment, and one more after each failure; then nothing fails any more.
    assert await read(engine.submit(command("good", [1, 2, 3]))) == expect([1, 2, 3])
    assert len(bench.attaches) == 4


def test_those_that_run_behind_it_do_not_notice() -> None:
    """With one sequence at a time in the executor, only the one that fails takes part in the step."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.poison = {tuple(POISON): Fault.STEP}
        bad = engine.submit(command("bad", POISON))
        behind = [engine.submit(command(f"r{i}", [i, 2, 3])) for i in range(4)]
        with pytest.raises(ComputationFailed):
            await bad.take()
        assert [await read(stream) for stream in behind] == [expect([i, 2, 3]) for i in range(4)]

    one = SchedulerLimits(max_batch_tokens=64, max_running=1, watermark=0.0, prefix_cache=True)
    run(body, limits=one)


@run_by(run)
async def test_a_request_that_gets_on_is_never_given_up(engine: EngineLoop, bench: Bench) -> None:
    """Every epoch fails after a token or two: a dozen of them end nobody, and the tokens are right."""
    bench.step_s = 0.01
    stream = engine.submit(command("a", [1, 2, 3], max_tokens=180))
    for _ in range(12):
        await _lose_after_a_token(engine, bench)
    assert await read(stream) == expect([1, 2, 3], 180)


async def _lose_after_a_token(engine: EngineLoop, bench: Bench) -> None:
    generated, epochs = engine.statistics.stats().generated_tokens_total, len(bench.attaches)
    await until(lambda: engine.statistics.stats().generated_tokens_total > generated)
    assert bench.link is not None
    bench.link.lose("failed", Fault.STEP)
    await until(lambda: len(bench.attaches) > epochs)


@pytest.mark.parametrize(("fault", "epochs"), [(Fault.GONE, 8), (Fault.NONE, None)])
@run_by(run, step_attempts=2)
async def test_an_executor_that_is_gone_is_hardly_the_steps_fault(
    engine: EngineLoop, bench: Bench, *, monkeypatch: pytest.MonkeyPatch, fault: Fault, epochs: int | None
) -> None:
    monkeypatch.setattr("pagekv.kvmanager.engine.recovery.RECONNECT_LAST_S", 0.01)
    bench.poison = {tuple(POISON): fault}
    bad = engine.submit(command("bad", POISON))
    if epochs is None:
        await until(lambda: len(bench.attaches) > 30)
        bench.poison = {}
        assert await read(bad) == expect(POISON)
    else:
        with pytest.raises(ComputationFailed):
            await bad.take()
        assert await read(engine.submit(command("good", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == epochs + 1


@run_by(run)
async def test_a_search_that_always_fails_is_given_up(engine: EngineLoop, bench: Bench) -> None:
    bench.poison = {tuple(POISON): Fault.STEP}
    search = SamplingParams(temperature=0.0, max_tokens=5, beam_width=3)
    with pytest.raises(ComputationFailed):
        await engine.submit(GenerateCommand("bad", POISON, search, n=2)).take()


def test_pauses_grow_while_epochs_fail_and_begin_anew_after_a_step() -> None:
    reconnect = Reconnect()
    pauses = [reconnect.pause_s(attached=True, steps=0) for _ in range(8)]
    assert pauses[0] == RECONNECT_FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == RECONNECT_LAST_S
    assert reconnect.pause_s(attached=True, steps=1) == RECONNECT_FIRST_S


def test_an_executor_that_is_away_is_asked_often() -> None:
    """And between two epochs that fail, it changes nothing about their pauses."""
    reconnect = Reconnect()
    assert max(reconnect.pause_s(attached=False, steps=0) for _ in range(50)) == UNREACHABLE_S
    assert reconnect.pause_s(attached=True, steps=0) == RECONNECT_LAST_S


def test_refusals_of_the_same_pools_in_a_row_are_final() -> None:
    room = RoomRefusals()
    again = [(8, 4)] * (MOST_ROOM_REFUSALS - 1)
    assert not any(room.are_final(asked) for asked in (*again, (8, 2), *again, None, *again))
    assert room.are_final(again[0])
