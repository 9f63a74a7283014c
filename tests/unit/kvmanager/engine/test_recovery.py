"""DESIGN 7: a step that fails again and again ends its requests, and nobody else's; one that gets on is never ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from support.engine.engine_harness import Bench, command, expect, read, run, until
from support.engine.fake_engine import MODEL

from pagekv.common.errors import ComputationFailed, InvalidRequest, PageKVError, StaleEpoch, Unavailable
from pagekv.common.statuses import abort_with
from pagekv.kvmanager.engine.executor_client import ExecutorLink, ExecutorLost
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.recovery import Fault
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.v1 import executor_service_pb2 as pb
from pagekv.v1 import executor_service_pb2_grpc as pb_grpc

POISON = [9, 9, 9]


def test_a_request_whose_step_always_fails_is_given_up_and_others_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.poison = {tuple(POISON): Fault.STEP}
        bad = engine.submit(command("bad", POISON))
        with pytest.raises(ComputationFailed, match="'bad' could not be computed: its step failed 3 times"):
            await bad.take()
        assert engine.queries.block_tables("bad") is None
        # The first attachment, and one more after each failure; then nothing fails any more.
        assert await read(engine.submit(command("good", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 4

    run(monkeypatch, body)


def test_those_that_run_behind_it_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sequence at a time in the executor, only the one that fails takes part in the step."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.poison = {tuple(POISON): Fault.STEP}
        bad = engine.submit(command("bad", POISON))
        behind = [engine.submit(command(f"r{i}", [i, 2, 3])) for i in range(4)]
        with pytest.raises(ComputationFailed):
            await bad.take()
        assert [await read(stream) for stream in behind] == [expect([i, 2, 3]) for i in range(4)]

    one = SchedulerLimits(max_batch_tokens=64, max_running=1, watermark=0.0, prefix_cache=True)
    run(monkeypatch, body, limits=one)


def test_a_request_that_gets_on_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch fails after a token or two: a dozen of them end nobody, and the tokens are right."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        stream = engine.submit(command("a", [1, 2, 3], max_tokens=180))
        for _ in range(12):
            await _lose_after_a_token(engine, bench)
        assert await read(stream) == expect([1, 2, 3], 180)

    run(monkeypatch, body)


async def _lose_after_a_token(engine: EngineLoop, bench: Bench) -> None:
    generated, epochs = engine.queries.stats().generated_tokens_total, len(bench.attaches)
    await until(lambda: engine.queries.stats().generated_tokens_total > generated)
    assert bench.link is not None
    bench.link.lose("failed", Fault.STEP)
    await until(lambda: len(bench.attaches) > epochs)


@pytest.mark.parametrize(("fault", "epochs"), [(Fault.GONE, 8), (Fault.NONE, None)])
def test_an_executor_that_is_gone_is_hardly_the_steps_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, epochs: int | None
) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
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

    run(monkeypatch, body, step_attempts=2)


def test_a_search_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.poison = {tuple(POISON): Fault.STEP}
        search = SamplingParams(temperature=0.0, max_tokens=5, beam_width=3)
        with pytest.raises(ComputationFailed):
            await engine.submit(GenerateCommand("bad", POISON, search, n=2)).take()

    run(monkeypatch, body)


class _Executor(pb_grpc.ExecutorServiceServicer):
    """Ends every stream of steps as it is told."""

    def __init__(self, end: PageKVError | grpc.StatusCode) -> None:
        self._end = end

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse()

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        return pb.AttachResponse(epoch=1)

    async def Run(self, request_iterator: AsyncIterator[pb.StepRequest], context: Any) -> AsyncIterator[pb.StepResult]:
        if isinstance(self._end, PageKVError):
            await abort_with(context, self._end)
        else:
            await context.abort(self._end, "words")
        yield pb.StepResult()


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (grpc.StatusCode.INTERNAL, Fault.STEP),
        (InvalidRequest("step", "must be 1"), Fault.STEP),
        (grpc.StatusCode.UNAVAILABLE, Fault.GONE),
        (Unavailable("the executor is shutting down"), Fault.NONE),
        (StaleEpoch("taken over"), Fault.NONE),
    ],
)
def test_what_ends_the_stream_says_whose_fault_it_was(end: PageKVError | grpc.StatusCode, fault: Fault) -> None:
    async def main() -> None:
        server = grpc.aio.server()
        pb_grpc.add_ExecutorServiceServicer_to_server(_Executor(end), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        woken = asyncio.Event()
        link = ExecutorLink(f"127.0.0.1:{port}", woken.set)
        await link.attach("m", MODEL, "any", False)
        await woken.wait()
        with pytest.raises(ExecutorLost) as lost:
            link.take_outcome()
        assert lost.value.fault is fault
        await link.close()
        await server.stop(None)

    asyncio.run(main())
