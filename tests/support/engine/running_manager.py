"""A manager in an event loop of the test, and a channel to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.stack import port_of
from support.prompts import as_prompt

from pagekv.common.port_file import read_port_file
from pagekv.kvmanager import server
from pagekv.kvmanager.access.opening import open_access
from pagekv.kvmanager.config import ManagerConfig, parse_config
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc

# Nobody listens there: the manager stays without an executor.
NOWHERE = "unix:/nonexistent/executor"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def config(tmp_path: Path, *argv: str) -> ManagerConfig:
    port_file = str(tmp_path / "port")
    base = ["--listen", "127.0.0.1:0", "--executor", NOWHERE, "--port-file", port_file, "--grace-s", "1"]
    return parse_config([*base, *argv], {})


class Running:
    """A manager in this event loop, and a channel to it."""

    def __init__(self, manager: server.Manager, channel: grpc.aio.Channel) -> None:
        self.manager = manager
        self.channel = channel
        self.stub = cast("pb_grpc.InferenceServiceAsyncStub", pb_grpc.InferenceServiceStub(channel))

    async def health(self) -> int:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest())
        return int(answer.status)

    async def until_health(self, status: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if await self.health() == status:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"health never became {status}")

    async def refusal(self) -> grpc.aio.AioRpcError:
        """Why a Generate call is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in self.stub.Generate(pb.GenerateRequest(prompt=as_prompt("x"))):
                pass
        return caught.value


def bound_port(path: Path) -> int:
    """Waits for the port file."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if listening := read_port_file(path):
            return port_of(listening)
        time.sleep(0.005)
    raise AssertionError("no port file was written")


def run(manager_config: ManagerConfig, body: Callable[[Running], Awaitable[None]]) -> int:
    """Runs a manager while `body` does, then stops it; its exit status."""

    async def main() -> int:
        stop = asyncio.Event()
        manager = server.Manager(manager_config, None, open_access(manager_config.access))
        task = asyncio.create_task(manager.run(stop))
        port = await asyncio.to_thread(bound_port, Path(manager_config.port_file))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await body(Running(manager, channel))
            stop.set()
            return await task

    return asyncio.run(main())


def model(directory: Path, fingerprint: str = "1", vocab_size: int = 500) -> EngineInfo:
    return EngineInfo(str(directory), fingerprint, 64, vocab_size, (1,), 4, 10, 0, "oracle")


def attach(engine: EngineLoop, info: EngineInfo) -> None:
    """As if an executor with this model had been attached."""
    engine._state.model = info
    engine._on_attached(True)


def main(argv: list[str], caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """Exit status and the last reason logged."""
    status = asyncio.run(server.serve(parse_config(argv, {})))
    fields = getattr(caplog.records[-1], "fields", {})
    return status, f"{caplog.records[-1].getMessage()}: {fields.get('reason')}"
