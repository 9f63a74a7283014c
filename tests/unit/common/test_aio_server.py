"""Calls of methods that nobody has: each is refused by itself, whatever its name is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.deaf_client import deaf_call
from support.event_loop import run_by

from pagekv.common import aio_server
from pagekv.common.server import GrpcServer


def run(body: Callable[[GrpcServer, Any], Awaitable[None]]) -> None:
    """Any: the type stubs know a channel by the messages of generated code."""

    async def main() -> None:
        server = GrpcServer("127.0.0.1:0", [])
        port = await server.start()
        try:
            async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await body(server, channel)
        finally:
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("method", ["/", "/nothing", "/grpc.health.v1.Health/Nothing", "//", "/ä", "/" + "x" * 4000])
@run_by(run)
async def test_a_method_that_nobody_has_is_unimplemented(server: GrpcServer, channel: Any, *, method: str) -> None:
    for kind in (channel.unary_unary, channel.unary_stream):
        call = kind(method)(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


@run_by(run)
async def test_a_method_whose_name_is_no_text_ends_no_other_call(server: GrpcServer, channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    for name in (b"/\x9d", b"/grpc.health.v1.Health/\xff", b"\x80" * 100):
        with deaf_call(server.port, name) as connection:
            connection.setblocking(False)
            answered = b""
            # The status comes in headers, with which no window interferes.
            while b"Method not found!" not in answered:
                answered += await asyncio.get_running_loop().sock_recv(connection, 4096)
    server.set_serving(True)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert await channel.unary_unary("/nothing")(b"", timeout=60).code() is grpc.StatusCode.UNIMPLEMENTED


@run_by(run)
async def test_a_server_with_refused_calls_ends_in_order(server: GrpcServer, channel: Any) -> None:
    calls = [channel.unary_unary("/nothing")(b"") for _ in range(50)]
    assert {await call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}
    await server.stop(5)
    # Other servers of this process are gRPC's own.
    assert not issubclass(cygrpc.AioServer, aio_server._AioServer)


def test_a_release_with_another_inside_serves_and_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aio_server, "_INSIDE", ("_handle_rpc", "_of_another_release"))

    async def body(server: GrpcServer, channel: Any) -> None:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(body)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage().startswith("grpcio is newer than this PageKV")
    assert record.fields["without"] == "_of_another_release"  # type: ignore[attr-defined]  # of our own logs
