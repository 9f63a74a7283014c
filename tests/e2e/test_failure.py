"""DESIGN 7, row by row, with real processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.calls import Caller, Result, request_for
from support.clients.gate import standing
from support.clients.stack import Process, Stack, running_manager
from support.waiting import wait_until

from pagekv.client.errors import Draining, from_rpc_error
from pagekv.v1 import inference_service_pb2 as pb

pytestmark = pytest.mark.e2e


async def health(target: str) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
        return int(answer.status)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_streams_survive_the_executor(signum: signal.Signals, executor: Process) -> None:
    requests = [
        request_for([index + 1, 5, 7], max_tokens=150, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(8)
    ]

    async def run(stack: Stack, disturb: bool) -> list[Result]:
        async with Caller(stack.target) as caller:
            calls = [caller.generate(request) for request in requests]
            async with standing(stack.gate, caller, calls, steps=30 if disturb else 0) as streams:
                if disturb:
                    assert executor.popen is not None
                    async with Caller(executor.target) as seen:
                        # Connected before: one that goes lets nobody in.
                        await seen.until_serving()
                        executor.popen.send_signal(signum)
                        if signum == signal.SIGTERM:
                            await seen.until_serving(serving=False)
                    if signum == signal.SIGTERM:
                        # The step that it is at, which it ends, and what it takes in until it has heard.
                        stack.gate.let_through(50)
                    await asyncio.to_thread(executor.popen.wait, 240)
                    await caller.until_serving(serving=False)
                    await asyncio.to_thread(executor.start, executor.port)
            return list(await asyncio.gather(*streams))

    with running_manager(executor) as stack:
        wanted = asyncio.run(run(stack, disturb=False))
        results = asyncio.run(run(stack, disturb=True))
        asyncio.run(_restarted_once(stack))
    assert [r.tokens for r in results] == [r.tokens for r in wanted]
    assert all(len(r.tokens) == 150 for r in results)


async def _restarted_once(stack: Stack) -> None:
    async with Caller(stack.target) as caller:
        assert (await caller.idle_stats()).executor_restarts_total == 1


def test_a_hung_executor_is_fenced_and_work_resumes(executor: Process) -> None:
    with running_manager(executor, ["--step-timeout-s", "1"]) as stack:

        async def run() -> list[int]:
            async with Caller(stack.target) as caller:
                assert stack.executor.popen is not None
                try:
                    with stack.gate.shut():
                        stack.gate.let_through(10)
                        stream = asyncio.create_task(caller.generate(request_for([1, 2], 100, ignore_eos=True)))
                        await caller.stats_when(lambda stats: stats.requests_total == 1)
                        stack.executor.popen.send_signal(signal.SIGSTOP)
                        await caller.stats_when(lambda stats: not stats.executor_attached)
                finally:
                    stack.executor.popen.send_signal(signal.SIGCONT)
                result = await stream
                again = await caller.generate(request_for([1, 2], 100, ignore_eos=True))
                assert result.tokens == again.tokens
                # Its steps of the old epoch after it woke up were refused: it costs no epoch but by hanging.
                restarts = (await caller.idle_stats()).executor_restarts_total
                assert restarts == stack.manager.log.read_text().count("no answer to a step for 1 s") > 0
                return result.tokens

        assert len(asyncio.run(run())) == 100


def test_a_full_queue_says_when_to_come_back(executor: Process) -> None:
    with running_manager(executor, ["--max-running", "1", "--max-queue", "2"]) as stack:

        async def run() -> None:
            async with Caller(stack.target) as caller:
                requests = [request_for([i + 1] * 20, 30, ignore_eos=True) for i in range(12)]
                with stack.gate.shut():
                    calls = [asyncio.create_task(caller.generate(request)) for request in requests]
                    await caller.stats_when(lambda s: s.requests_total + s.rejected_requests_total == 12)
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                refused = [o for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
                # Two wait, and one runs unless all came before the first step was planned.
                assert len(refused) in (9, 10)
                assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
                assert b"RetryInfo" in dict(refused[0].trailing_metadata() or ())["grpc-status-details-bin"]
                assert sum(isinstance(o, Result) and len(o.tokens) == 30 for o in outcomes) == 12 - len(refused)

        asyncio.run(run())


def test_sigterm_drains_running_streams_and_exits_0(executor: Process) -> None:
    with running_manager(executor) as stack:

        async def run() -> None:
            async with Caller(stack.target) as caller:
                call = caller.generate(request_for([1, 2], 100, ignore_eos=True))
                async with standing(stack.gate, caller, [call], steps=4) as (stream,):
                    assert stack.manager.popen is not None
                    stack.manager.popen.send_signal(signal.SIGTERM)
                    await caller.until_serving(serving=False)
                assert len((await stream).tokens) == 100

        asyncio.run(run())
        assert stack.manager.popen is not None
        assert stack.manager.popen.wait(240) == 0


def test_sigterm_ends_what_the_grace_time_cannot_finish_so_that_it_can_be_resumed(executor: Process) -> None:
    """No ending of the answer: an error that says when to come back, behind every token that was there."""
    with running_manager(executor, ["--grace-s", "0.5"]) as stack:

        async def run() -> grpc.aio.AioRpcError:
            async with Caller(stack.target) as caller:
                assert stack.manager.popen is not None
                with stack.gate.shut():
                    stack.gate.let_through(5)
                    call = caller.inference.Generate(request_for([1, 2], 1000, ignore_eos=True))
                    last, tokens = pb.GenerateResponse(), 0
                    try:
                        async for last in call:
                            tokens += len(last.chunk.token_ids)
                            if tokens == 5:
                                stack.manager.popen.send_signal(signal.SIGTERM)
                    except grpc.aio.AioRpcError as error:
                        assert tokens == last.chunk.completion_tokens == 5
                        return error
                raise AssertionError(f"the answer ended: {last}")

        error = asyncio.run(run())
        drained = from_rpc_error(error, stack.target)
        assert isinstance(drained, Draining)
        assert (error.code(), drained.retry_delay_s) == (grpc.StatusCode.UNAVAILABLE, 1.0)
        assert stack.manager.popen is not None
        assert stack.manager.popen.wait(240) == 0


def test_a_second_manager_is_refused_while_the_first_lives(executor: Process, tmp_path: Path) -> None:
    with running_manager(executor) as stack:
        second = Process("pagekv.kvmanager", ["--executor", executor.target], tmp_path)
        second.start()
        try:
            wait_until(lambda: "FAILED_PRECONDITION" in second.tail(), why=second.tail)

            async def run() -> None:
                assert await health(second.target) == health_pb2.HealthCheckResponse.NOT_SERVING
                async with Caller(stack.target) as caller:
                    assert len((await caller.generate(request_for([1], 20, ignore_eos=True))).tokens) == 20

            asyncio.run(run())
        finally:
            second.stop()


def test_flags_that_the_executor_cannot_meet_end_the_manager_with_their_name(executor: Process, tmp_path: Path) -> None:
    args = ["--executor", executor.target, "--num-device-blocks", "1000000000"]
    manager = Process("pagekv.kvmanager", args, tmp_path)
    manager.start()
    assert manager.popen is not None
    assert manager.popen.wait(240) == 1
    assert "--num-device-blocks 1000000000 needs" in manager.tail()
    assert "Traceback" not in manager.tail()
