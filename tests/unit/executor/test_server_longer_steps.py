"""An executor whose sequences are long listens anew once its model is loaded, for steps that are larger."""

from __future__ import annotations

import asyncio
import math
import socket
import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.executor.config import parse_config
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.server import Executor


def test_longer_steps_are_listened_for_at_the_same_address() -> None:
    """A watcher of health connects again; who has the port meanwhile is waited for."""

    async def run() -> None:
        loading, free = threading.Event(), threading.Event()

        def load() -> OracleBackend:
            assert loading.wait(60)
            return OracleBackend(OracleModel(max_model_len=2**17 + 1))

        executor, stop = Executor(parse_config(["--listen", "127.0.0.1:0"]), load), asyncio.Event()
        serving = asyncio.create_task(executor.run(stop))
        while not executor.listening:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
        address, first = executor.address, executor._grpc
        stopped = first.stop

        def free_it(thief: socket.socket) -> None:
            thief.close()
            free.set()

        async def stop_and_lose_the_port(grace_s: float) -> None:
            await stopped(grace_s)
            thief = socket.create_server(("127.0.0.1", first.port))
            asyncio.get_running_loop().call_later(0.3, free_it, thief)

        first.stop = stop_and_lose_the_port  # type: ignore[method-assign]  # its port is taken at once
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            loading.set()
            while executor.serving_since == math.inf:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
            assert free.is_set()
            assert executor.address == address
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert executor._grpc is not first
        stop.set()
        assert await serving == 0

    asyncio.run(run())


def test_an_executor_of_131072_tokens_listens_once() -> None:
    async def run() -> None:
        executor = Executor(parse_config(["--listen", "127.0.0.1:0"]), lambda: OracleBackend(OracleModel()))
        first = executor._grpc
        await executor._take_longest_step(2**17)
        assert executor._grpc is first

    asyncio.run(run())
