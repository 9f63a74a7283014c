"""Managers that come back, fight or go, and what callers without our library are told (DESIGN 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from support.clients.calls import Caller, request_for
from support.clients.gate import standing
from support.clients.stack import ORACLE, Process, Stack, running_executor, running_manager, running_stack

from pagekv.common.statuses import STATUS_DETAILS_KEY

pytestmark = pytest.mark.e2e

SLOW = [*ORACLE, "--step-time-ms", "5"]


def retry_delay_s(error: grpc.aio.AioRpcError) -> Any:
    """The delay of RetryInfo; fails when there is none."""
    details = dict(error.trailing_metadata() or ())[STATUS_DETAILS_KEY]
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(details).details)
    return info.retry_delay.ToNanoseconds() / 1e9


async def refusal(caller: Caller) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.generate(request_for([1, 2, 3], 5))
    return refused.value


@contextmanager
def fighting_managers(executor: Process, directory: Path, count: int) -> Iterator[list[Process]]:
    """Managers that each take the executor over whenever they do not have it."""
    managers = []
    with ExitStack() as stack:
        for number in range(count):
            place = directory / str(number)
            place.mkdir()
            args = ["--executor", executor.target, "--take-over"]
            managers.append(Process("pagekv.kvmanager", args, place))
            managers[-1].start()
            stack.callback(managers[-1].kill)
        yield managers


def test_two_managers_that_fight_over_one_executor_both_finish_unharmed(tmp_path: Path) -> None:
    """Never two epochs at once: the oracle would find the tokens of the other one's sequences in the blocks."""
    requests = [request_for([i + 1, 5, 7], 60, ignore_eos=True, temperature=i % 2, seed=5) for i in range(8)]

    async def both(managers: list[Process]) -> None:
        async with Caller(managers[0].target) as one, Caller(managers[1].target) as other:
            results = await asyncio.gather(one.generate_many(requests), other.generate_many(requests))
            # The two do fight, with requests and without.
            for caller in (one, other):
                await caller.stats_when(lambda stats: stats.executor_restarts_total > 0)
                await caller.idle_stats()
        first, second = [[result.tokens for result in of_one] for of_one in results]
        assert first == second
        assert all(len(tokens) == 60 for tokens in first)
        # Each was written off with ABORTED.
        for manager in managers:
            assert "ABORTED" in manager.tail(10_000)
            assert "broken invariant" not in manager.tail(10_000)

    with running_executor(SLOW) as executor, fighting_managers(executor, tmp_path, 2) as managers:
        for manager in managers:
            manager.wait_serving()
        asyncio.run(both(managers))
        assert "a step failed" not in executor.tail(10_000)


@pytest.mark.long
def test_callers_without_the_library_are_told_to_come_back() -> None:
    """The manager is killed: UNAVAILABLE. It is back without an executor, or drains: UNAVAILABLE, and when."""

    async def killed(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            call = caller.generate(request_for([1, 2], 1000, ignore_eos=True))
            async with standing(stack.gate, caller, [call], steps=4) as (lost,):
                await asyncio.to_thread(stack.manager.kill)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await lost
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await refusal(caller)).code() is grpc.StatusCode.UNAVAILABLE

    async def without_executor(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            error = await refusal(caller)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert retry_delay_s(error) > 0

    async def draining(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            call = caller.generate(request_for([1, 2], 400, ignore_eos=True))
            async with standing(stack.gate, caller, [call], steps=4) as (running,):
                stopping = asyncio.create_task(asyncio.to_thread(stack.manager.stop))
                await caller.until_serving(serving=False)
                refused = await refusal(caller)
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
                assert "shutting down" in str(refused.details())
                assert retry_delay_s(refused) > 0
            assert len((await running).tokens) == 400
            assert await stopping == 0

    with running_stack(ORACLE, gated=True) as stack:
        asyncio.run(killed(stack))
        stack.executor.kill()
        stack.manager.start()
        asyncio.run(without_executor(stack))
        stack.manager.kill()
        stack.executor.start(stack.executor.port)
        stack.manager.start()
        stack.manager.wait_serving()
        asyncio.run(draining(stack))


@pytest.mark.long
def test_a_full_disk_for_logs_stops_nobody(tmp_path: Path) -> None:
    """Every write to standard error fails with ENOSPC, at the level that writes most; both exit 0 all the same."""
    args = ["--log-level", "debug", "--log-format", "json"]
    executor = Process("pagekv.executor", [*SLOW, *args], tmp_path)
    executor.log = Path("/dev/full")
    executor.start()
    try:
        executor.wait_serving()
        manager = Process("pagekv.kvmanager", ["--executor", executor.target, *args], tmp_path)
        manager.log = Path("/dev/full")
        manager.start()
        try:
            manager.wait_serving()

            async def run() -> None:
                async with Caller(manager.target) as caller:
                    results = await caller.generate_many([request_for([5, 6], 30, ignore_eos=True)] * 8)
                    assert {len(result.tokens) for result in results} == {30}
                    # A warning with a trace, and an epoch: the paths that log most.
                    await asyncio.to_thread(executor.kill)
                    await asyncio.to_thread(executor.start, executor.port)
                    again = await caller.generate(request_for([5, 6], 30, ignore_eos=True))
                    assert again.tokens == results[0].tokens

            asyncio.run(run())
            assert manager.stop() == 0
        finally:
            manager.kill()
        assert executor.stop() == 0
    finally:
        executor.kill()


@pytest.mark.long
def test_a_manager_that_comes_back_finds_the_executor_free() -> None:
    """Its own dead stream does not lock it out."""
    with running_executor(SLOW) as executor:
        for _ in range(3):
            with running_manager(executor) as stack:

                async def run(target: str) -> None:
                    async with Caller(target) as caller:
                        assert len((await caller.generate(request_for([1], 5, ignore_eos=True))).tokens) == 5

                asyncio.run(run(stack.target))
                stack.manager.kill()
