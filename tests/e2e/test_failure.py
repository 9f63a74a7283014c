"""DESIGN 7, row by row, with real processes."""

from __future__ import annotations

import asyncio
import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.calls import Caller, Result, request_for
from support.clients.stack import ORACLE, Process, Stack, running_executor, running_stack

from pagekv.client.errors import Draining, from_rpc_error
from pagekv.v1 import inference_service_pb2 as pb

pytestmark = pytest.mark.e2e

SLOW = [*ORACLE, "--step-time-ms", "5"]


async def health(target: str) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
        return int(answer.status)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_streams_survive_the_executor(signum: signal.Signals) -> None:
    requests = [
        request_for([index + 1, 5, 7], max_tokens=150, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(8)
    ]

    async def run(stack: Stack, disturb: bool) -> list[Result]:
        async with Caller(stack.target) as caller:
            streams = asyncio.gather(*(caller.generate(request) for request in requests))
            if disturb:
                await asyncio.sleep(0.3)
                assert stack.executor.popen is not None
                stack.executor.popen.send_signal(signum)
                await asyncio.to_thread(stack.executor.popen.wait, 240)
                deadline = time.monotonic() + 120
                while await health(stack.target) == health_pb2.HealthCheckResponse.SERVING:
                    assert time.monotonic() < deadline, "the manager's health does not show the loss"
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(stack.executor.start, stack.executor.port)
            return await streams

    with running_stack(SLOW) as stack:
        wanted = asyncio.run(run(stack, disturb=False))
        results = asyncio.run(run(stack, disturb=True))
        asyncio.run(_restarted_once(stack))
    assert [r.tokens for r in results] == [r.tokens for r in wanted]
    assert all(len(r.tokens) == 150 for r in results)


async def _restarted_once(stack: Stack) -> None:
    async with Caller(stack.target) as caller:
        assert (await caller.idle_stats()).executor_restarts_total == 1


def test_a_hung_executor_is_fenced_and_work_resumes() -> None:
    with running_stack(SLOW, ["--step-timeout-s", "1"]) as stack:

        async def run() -> list[int]:
            async with Caller(stack.target) as caller:
                stream = asyncio.create_task(caller.generate(request_for([1, 2], 100, ignore_eos=True)))
                await asyncio.sleep(0.2)
                stack.executor.popen.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]  # started above
                await asyncio.sleep(2.0)
                stack.executor.popen.send_signal(signal.SIGCONT)  # type: ignore[union-attr]  # started above
                result = await stream
                again = await caller.generate(request_for([1, 2], 100, ignore_eos=True))
                assert result.tokens == again.tokens
                # Its steps of the old epoch after it woke up were refused: no more than one epoch was lost.
                assert (await caller.idle_stats()).executor_restarts_total == 1
                return result.tokens

        assert len(asyncio.run(run())) == 100


def test_a_cancelled_or_late_call_gives_its_blocks_back() -> None:
    with running_stack(SLOW) as stack:

        async def run() -> None:
            async with Caller(stack.target) as caller:
                free = (await caller.idle_stats()).free_blocks
                call = caller.inference.Generate(request_for([1] * 100, 1000, ignore_eos=True))
                await call.read()
                call.cancel()
                assert (await caller.idle_stats()).free_blocks == free
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    await caller.generate(request_for([1] * 100, 1000, ignore_eos=True), deadline_s=0.3)
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                stats = await caller.idle_stats()
                assert stats.free_blocks == free
                assert stats.aborted_requests_total == 2

        asyncio.run(run())


def test_a_full_queue_says_when_to_come_back() -> None:
    with running_stack(SLOW, ["--max-running", "1", "--max-queue", "2"]) as stack:

        async def run() -> None:
            async with Caller(stack.target) as caller:
                calls = [caller.generate(request_for([i + 1] * 20, 30, ignore_eos=True)) for i in range(12)]
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                refused = [o for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
                assert 0 < len(refused) < 12
                assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
                assert b"RetryInfo" in dict(refused[0].trailing_metadata() or ())["grpc-status-details-bin"]
                assert sum(isinstance(o, Result) and len(o.tokens) == 30 for o in outcomes) == 12 - len(refused)

        asyncio.run(run())


def test_sigterm_drains_running_streams_and_exits_0() -> None:
    with running_stack(SLOW) as stack:

        async def run() -> None:
            async with Caller(stack.target) as caller:
                stream = asyncio.create_task(caller.generate(request_for([1, 2], 100, ignore_eos=True)))
                await asyncio.sleep(0.2)
                assert stack.manager.popen is not None
                stack.manager.popen.send_signal(signal.SIGTERM)
                assert len((await stream).tokens) == 100

        asyncio.run(run())
        assert stack.manager.popen is not None
        assert stack.manager.popen.wait(240) == 0
        assert stack.executor.stop() == 0


def test_sigterm_ends_what_the_grace_time_cannot_finish_so_that_it_can_be_resumed() -> None:
    """No ending of the answer: an error that says when to come back, behind every token that was there."""
    with running_stack([*ORACLE, "--step-time-ms", "20"], ["--grace-s", "0.5"]) as stack:

        async def run() -> grpc.aio.AioRpcError:
            async with Caller(stack.target) as caller:
                assert stack.manager.popen is not None
                call = caller.inference.Generate(request_for([1, 2], 1000, ignore_eos=True))
                last, tokens = pb.GenerateResponse(), 0
                try:
                    async for last in call:
                        tokens += len(last.chunk.token_ids)
                        if tokens == 3:
                            stack.manager.popen.send_signal(signal.SIGTERM)
                except grpc.aio.AioRpcError as error:
                    assert 3 <= tokens == last.chunk.completion_tokens < 1000
                    return error
                raise AssertionError(f"the answer ended: {last}")

        error = asyncio.run(run())
        drained = from_rpc_error(error, stack.target)
        assert isinstance(drained, Draining)
        assert (error.code(), drained.retry_delay_s) == (grpc.StatusCode.UNAVAILABLE, 1.0)
        assert stack.manager.popen is not None
        assert stack.manager.popen.wait(240) == 0


def test_a_second_manager_is_refused_while_the_first_lives() -> None:
    with running_stack(SLOW) as stack:
        second = Process(
            "pagekv.kvmanager.server", ["--executor", stack.executor.target], stack.manager.directory / ".."
        )
        second.log = stack.manager.directory / "second.log"
        second.start()
        try:
            time.sleep(1.0)

            async def run() -> None:
                assert await health(second.target) == health_pb2.HealthCheckResponse.NOT_SERVING
                async with Caller(stack.target) as caller:
                    assert len((await caller.generate(request_for([1], 20, ignore_eos=True))).tokens) == 20

            asyncio.run(run())
            assert "FAILED_PRECONDITION" in second.tail()
        finally:
            second.stop()


def test_flags_that_the_executor_cannot_meet_end_the_manager_with_their_name() -> None:
    with running_executor([*ORACLE, "--kv-memory", "1MiB"]) as executor:
        args = ["--executor", executor.target, "--num-device-blocks", "1000000"]
        manager = Process("pagekv.kvmanager.server", args, executor.directory)
        manager.start()
        assert manager.popen is not None
        assert manager.popen.wait(240) == 1
        assert "--num-device-blocks 1000000 needs" in manager.tail()
        assert "Traceback" not in manager.tail()
