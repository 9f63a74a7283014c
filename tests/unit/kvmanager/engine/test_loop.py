"""The engine loop over a scripted link, with late, odd and lost answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from support.engine.engine_harness import (
    DESCRIPTION,
    VOCAB,
    Bench,
    Link,
    command,
    config,
    described,
    expect,
    read,
    run,
    until,
)
from support.event_loop import in_event_loop, run_by

from pagekv.common.errors import Draining, InvalidRequest, SequenceFailed, Unavailable
from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.executor_client import AttachRefused, ExecutorLost, NoRoom
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.recovery import MOST_ROOM_REFUSALS
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepResult
from pagekv.kvmanager.scheduling.swapping import SwapPolicy
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.v1 import types_pb2

RUNNING, WAITING = types_pb2.SEQUENCE_STATE_RUNNING, types_pb2.SEQUENCE_STATE_WAITING


@run_by(run)
async def test_tokens_come_through_and_blocks_go_back(engine: EngineLoop) -> None:
    streams = [engine.submit(command(f"r{i}", [i, 1, 2, 3, 4])) for i in range(5)]
    assert [await read(stream) for stream in streams] == [expect([i, 1, 2, 3, 4]) for i in range(5)]


@run_by(run)
async def test_an_answer_that_nobody_asked_for_costs_an_epoch(engine: EngineLoop, bench: Bench) -> None:
    assert bench.link is not None
    bench.link._results.append(StepResult(1, [], [], {}, 0, 0, 0))
    bench.link._wake()
    assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
    assert len(bench.attaches) == 2


def test_the_log_says_what_flags_and_executor_allow_together(caplog: pytest.LogCaptureFixture) -> None:
    """Both flags ask for more than the executor has."""
    caplog.set_level("INFO")

    async def body(engine: EngineLoop, bench: Bench) -> None:
        pass

    limits = replace(config().limits, max_running=65536)
    run(body, max_model_len=10**6, limits=limits)
    (line,) = (vars(record)["fields"] for record in caplog.records if record.getMessage() == "attached")
    assert (line["max_model_len"], line["max_running"]) == (DESCRIPTION.max_model_len, DESCRIPTION.max_sequences)


@pytest.mark.parametrize(
    ("mode", "write_back", "warned"), [("swap", False, 2), ("recompute", True, 2), ("auto", False, 0)]
)
def test_a_host_pool_that_only_flags_ask_for_is_warned_of_whenever_it_is_gone(
    mode: str, write_back: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first executor has none, the second has one, and the last two have none."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for each in (described(host_kv_bytes=8), DESCRIPTION, DESCRIPTION):
            bench.description = each
            epochs = engine._state.epochs
            assert bench.link is not None
            bench.link.lose()
            while engine._state.epochs == epochs:  # noqa: ASYNC110  # sets no event
                await asyncio.sleep(0.005)

    run(body, limits=replace(config().limits, swap=SwapPolicy(mode), write_back=write_back))
    told = [record.getMessage() for record in caplog.records if "host pool" in record.getMessage()]
    assert told == ["the executor offers no host pool: --preemption swap and --write-back have no effect"] * warned


def test_graphs_that_could_not_be_recorded_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Counted anew with every executor that is attached."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        stats = engine.statistics.stats()
        assert (stats.executor_graphs, stats.executor_failed_graphs) == (5, 0)
        assert bench.link is not None
        bench.failed_graphs = 2
        bench.link._results.append(StepResult(1, [], [], {}, 0, 0, 0))
        bench.link._wake()
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        stats = engine.statistics.stats()
        assert (stats.executor_graphs, stats.executor_failed_graphs) == (5, 2)

    run(body)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("the executor runs steps without CUDA graphs" in error for error in errors)


@run_by(run)
async def test_a_sequence_that_fails_ends_its_request_and_not_the_epoch(engine: EngineLoop, bench: Bench) -> None:
    """The second step in flight still has it."""
    assert bench.link is not None
    bench.step_s = 0.01
    bench.link._executor.fails = lambda prefix: prefix[:3] == (9, 9, 9) and len(prefix) == 5
    bad = engine.submit(command("bad", [9, 9, 9], n=2))
    good = engine.submit(command("good", [1, 2, 3]))
    with pytest.raises(SequenceFailed, match="request 'bad' could not be computed: it was told to"):
        await read(bad)
    assert await read(good) == expect([1, 2, 3])
    assert await read(engine.submit(command("bad", [9, 9, 8]))) == expect([9, 9, 8])
    assert len(bench.attaches) == 1
    assert engine.statistics.stats().failed_requests_total == 1


@run_by(run, step_timeout_s=0.2)
async def test_a_step_without_an_answer_costs_an_epoch(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 60
    stream = engine.submit(command("a", [1, 2, 3]))
    await until(lambda: bool(bench.plans))
    bench.step_s = 0
    assert await read(stream) == expect([1, 2, 3])
    # More where the test's process stands still for so long itself.
    assert len(bench.attaches) >= 2


@run_by(run, step_timeout_s=60)
async def test_a_manager_that_was_stopped_blames_no_step_for_it(
    engine: EngineLoop, bench: Bench, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGSTOP, while a step is answered: an hour has gone by when the watchdog looks the next time."""
    bench.step_s = 3600
    stream = engine.submit(command("a", [1, 2, 3]))
    await until(lambda: bool(bench.plans))
    looks: list[float] = []

    def clock() -> float:
        looks.append(time.monotonic() + 3600)
        return looks[-1]

    monkeypatch.setattr(engine._in_flight, "_clock", clock)
    await until(lambda: bool(looks))
    assert bench.link is not None
    bench.step_s = 0
    bench.link._finish()
    assert await read(stream) == expect([1, 2, 3])
    assert len(bench.attaches) == 1


@run_by(run)
async def test_another_model_ends_requests_and_keeps_the_counters(engine: EngineLoop, bench: Bench) -> None:
    await read(engine.submit(command("a", [1, 2, 3])))
    before = engine.statistics.stats()
    assert engine.model is not None
    first = engine.model.model_fingerprint
    bench.description = described(model_fingerprint="beef", eos_token_ids=tuple(range(VOCAB)))
    assert bench.link is not None
    bench.link.lose()
    await until(lambda: len(bench.attaches) >= 2)
    assert engine.statistics.stats().generated_tokens_total == before.generated_tokens_total == 6
    with pytest.raises(Unavailable, match="came back with another model"):
        engine.submit(replace(command("read for the first", [1, 2, 3]), model_fingerprint=first))
    # Nothing of the first model is hit, and the second one's end-of-sequence ids count.
    tokens, finish = await read(engine.submit(command("b", [1, 2, 3])))
    assert (len(tokens), finish) == (1, FinishReason.STOP)


@run_by(run)
async def test_a_smaller_pool_ends_the_requests_that_no_longer_fit(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 0.01
    large = engine.submit(command("large", [1, 2, 3], max_tokens=40))
    small = engine.submit(command("small", [1, 2, 3]))
    await until(lambda: len(bench.plans) >= 3)
    bench.description = described(device_kv_bytes=5)
    assert bench.link is not None
    bench.link.lose()
    assert await read(small) == expect([1, 2, 3])
    with pytest.raises(Unavailable, match="smaller pool"):
        await read(large)
    with pytest.raises(InvalidRequest, match=r"need 6 blocks, the pool has 5"):
        engine.submit(command("x", [1, 2, 3], max_tokens=19))
    assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)


@run_by(run)
async def test_fewer_slots_end_the_searches_that_need_more(engine: EngineLoop, bench: Bench) -> None:
    """All beams must be there at once: such a search would wait for ever, and everything else behind it."""
    bench.step_s = 0.01
    sampling = SamplingParams(temperature=0.0, max_tokens=20, beam_width=4)
    wide = engine.submit(GenerateCommand("wide", [1, 2, 3], sampling))
    plain = engine.submit(command("plain", [4, 5], max_tokens=20))
    await until(lambda: len(bench.plans) >= 6)
    bench.description = described(max_sequences=3)
    assert bench.link is not None
    bench.link.lose()
    with pytest.raises(Unavailable, match="fewer sequences"):
        await read(wide)
    assert await read(plain) == expect([4, 5], 20)


def test_what_has_ended_needs_no_garbage_collector() -> None:
    """Sequences point at their request. Were it to point back, prompts of a hundred thousand tokens would stay for
    thousands of requests, until a full collection.
    """
    ended: list[tuple[LiveRequest, int]] = []

    class Noting(Observer):
        def ended(self, request: LiveRequest, end: RequestEnd) -> None:
            ended.append((request, len(request.sequences)))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("read", [1], n=2)))
        engine.release(engine.submit(command("left", [2], n=3)))

    run(body, observers=[Noting()])
    assert [(request.command.request_id, was, request.sequences) for request, was in ended] == [
        ("read", 2, []),
        ("left", 3, []),
    ]


@run_by(run, pipeline_depth=1)
async def test_a_request_that_ends_before_its_sequences_part_leaves_nothing(engine: EngineLoop, bench: Bench) -> None:
    """The other sequences wait for the prompt of the first one, which is under way."""
    bench.step_s = 0.05
    left, other = engine.submit(command("left", [4, 5, 6], n=3)), engine.submit(command("other", [1, 2, 3]))
    await until(lambda: len(bench.plans) > 0)
    tables = await engine.snapshots.block_tables("left")
    assert tables is not None
    assert [table.state for table in tables.sequences] == [RUNNING, WAITING, WAITING]
    engine.release(left)
    assert await read(other) == expect([1, 2, 3])


def test_a_preempted_request_is_swapped_out_and_its_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command(f"r{i}", [i, 5, 6, 7, 8], max_tokens=12)) for i in range(4)]
        for i, stream in enumerate(streams):
            assert await read(stream) == expect([i, 5, 6, 7, 8], 12)
        stats = engine.statistics.stats()
        assert stats.num_host_blocks == 40
        assert stats.host_held_blocks == 0
        assert 0 < stats.swap_preemptions_total <= stats.preemptions_total
        assert stats.swapped_out_blocks_total > 0

    limits = replace(config().limits, swap=SwapPolicy("swap"))
    monkeypatch.setattr("support.engine.engine_harness.DESCRIPTION", described(host_kv_bytes=40))
    run(body, num_device_blocks=9, limits=limits)


@in_event_loop
async def test_the_end_of_the_grace_time_is_no_ending_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets what was there, and then an error that says that another manager can go on."""
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Link(bench, wake))
    engine = EngineLoop(config())
    task = asyncio.create_task(engine.run())
    await engine.wait_ready()
    stream = engine.submit(command("a", [1, 2, 3], max_tokens=30))
    (news,) = await stream.take()
    await engine.stop(0)
    with pytest.raises(Draining, match="shutting down") as refused:
        engine.submit(command("b", [1]))
    assert refused.value.retry_delay_s == 1.0
    assert (news.finish, news.token_ids) == (None, expect([1, 2, 3], 30)[0][: len(news.token_ids)])
    with pytest.raises(Draining, match="shutting down"):
        await read(stream)
    stats = engine.statistics.stats()
    assert (stats.aborted_requests_total, stats.active_blocks) == (1, 0)
    await task


@pytest.mark.parametrize(("policy", "share", "cached"), [("lru", 0.5, 0), ("slru", 0.5, 8), ("slru", 0.0, 0)])
def test_blocks_are_evicted_as_the_flags_say(policy: str, share: float, cached: int) -> None:
    """Two blocks were hit, then 100 blocks are read once in a pool of 64."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        prefix = list(range(8))
        for number in range(2):
            await read(engine.submit(command(f"hit {number}", [*prefix, 40 + number], 1)))
        for token in range(10, 14):
            await read(engine.submit(command(f"scan {token}", [token] * 100, 1)))
        assert engine.queries.lookup_prefix([*prefix, 49], CacheIdentity()).device_tokens == cached

    run(body, eviction_policy=policy, protected_share=share)


@run_by(run)
async def test_refused_steps_are_tried_again_ever_more_slowly(
    engine: EngineLoop, bench: Bench, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    pause = EngineLoop._pause

    async def noted(engine: EngineLoop, seconds: float) -> None:
        asked.append(seconds)
        bench.broken = len(asked) < 4
        await pause(engine, seconds)

    monkeypatch.setattr(EngineLoop, "_pause", noted)
    bench.broken = True
    assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
    assert asked == [0.05, 0.1, 0.2, 0.4]
    # On a busy machine later, and an event loop's timers go off up to its clock's resolution early.
    for sooner, later, seconds in zip(bench.attaches[:-1], bench.attaches[1:], asked, strict=True):
        assert later - sooner > seconds - 0.001


def test_a_reason_for_no_executor_is_logged_once_until_it_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An executor that loads is asked four times a second, and its reason is the same for minutes, but for figures."""
    asked: list[int] = []

    class Loading(Link):
        async def describe(self, block_size: int, token_budget: int) -> pb.DescribeResponse:
            asked.append(1)
            if len(asked) < 9:
                raise ExecutorLost(f"loading: {len(asked)} GB" if len(asked) < 6 else "still starting")
            return await super().describe(block_size, token_budget)

    async def main() -> None:
        bench = Bench()
        monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Loading(bench, wake))
        monkeypatch.setattr("pagekv.kvmanager.engine.recovery.Reconnect.pause_s", lambda *_, **__: 0.0)
        engine = EngineLoop(config())
        task = asyncio.create_task(engine.run())
        await engine.wait_ready()
        assert bench.link is not None
        bench.link.lose("still starting")
        await until(lambda: len(bench.attaches) == 2)
        await engine.stop(1)
        await task

    asyncio.run(main())
    reasons = [
        str(vars(record)["fields"]["reason"]) for record in caplog.records if record.getMessage() == "no executor"
    ]
    assert reasons == ["loading: 1 GB", "still starting", "still starting"]


@pytest.mark.parametrize("offers_less", [False, True])
def test_a_first_executor_without_room_is_asked_on_only_while_it_offers_less(
    monkeypatch: pytest.MonkeyPatch, offers_less: bool
) -> None:
    """As one that cannot page-lock a host pool offers half of it the next time."""
    asked: list[int] = []

    class Full(Link):
        async def attach(self, manager_id: str, model: EngineInfo, layout: str, take_over: bool) -> pb.AttachResponse:
            asked.append(model.num_device_blocks)
            if offers_less and len(asked) > 2 * MOST_ROOM_REFUSALS:
                return await super().attach(manager_id, model, layout, take_over)
            if offers_less:
                self._bench.description.device_kv_bytes -= self._bench.description.bytes_per_block
            raise NoRoom("Attach: no room", (model.num_device_blocks, model.num_host_blocks))

    async def main() -> None:
        bench = Bench()
        bench.description = described()
        monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Full(bench, wake))
        monkeypatch.setattr("pagekv.kvmanager.engine.recovery.Reconnect.pause_s", lambda *_, **__: 0.0)
        engine = EngineLoop(config())
        task = asyncio.create_task(engine.run())
        if offers_less:
            await engine.wait_ready()
            await engine.stop(1)
        await task

    if offers_less:
        asyncio.run(main())
        assert len({*asked}) == len(asked) == 2 * MOST_ROOM_REFUSALS + 1
    else:
        with pytest.raises(AttachRefused, match="Attach: no room"):
            asyncio.run(main())
        assert len(asked) == MOST_ROOM_REFUSALS
