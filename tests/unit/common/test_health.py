"""Health of a process: changes reach every watcher, and no watcher holds a change up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.deaf_client import deaf_call
from support.event_loop import run_by

from pagekv.common.health import SERVICE_NAME
from pagekv.common.server import GrpcServer
from pagekv.common.statuses import STATUS_DETAILS_KEY

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def run(body: Callable[[GrpcServer, Any], Awaitable[None]], *, reflection: bool = False) -> None:
    """Any: the type stubs know a channel by the messages of generated code."""

    async def main() -> None:
        server = GrpcServer("127.0.0.1:0", ["test.Service"], reflection)
        port = await server.start()
        try:
            async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await body(server, channel)
        finally:
            await server.stop(0)

    asyncio.run(main())


def request(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@run_by(run)
async def test_checks_say_what_was_set_of_the_process_and_of_each_service(server: GrpcServer, channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for serving in (False, True, False):
        server.set_serving(serving)
        for name in ("", "test.Service"):
            assert (await stub.Check(request(name))).status == (SERVING if serving else NOT_SERVING)
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
            ("", "test.Service"), SERVING if serving else NOT_SERVING
        )
    with pytest.raises(grpc.aio.AioRpcError, match="no service 'other' here") as caught:
        await stub.Check(request("other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["Check", "Watch"])
@run_by(run)
async def test_a_name_that_is_long_is_refused_before_it_is_read(server: GrpcServer, channel: Any, *, name: str) -> None:
    """Strangers send it, and a watch lasts. The last name of a message counts, but all of them are kept."""
    call = channel.stream_stream(f"/{SERVICE_NAME}/{name}")()
    await call.write(request("a" * 4096).SerializeToString() + request("test.Service").SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError, match="must be at most 4096 bytes, has 4113") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@run_by(run)
async def test_watchers_get_every_change_that_lasts_and_go_when_they_like(server: GrpcServer, channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(request(name)) for name in ("", "test.Service", "other")]
    assert [(await watch.read()).status for watch in watches] == [NOT_SERVING, NOT_SERVING, SERVICE_UNKNOWN]
    watches.pop().cancel()
    for serving in (True, False):
        server.set_serving(serving)
        server.set_serving(serving)  # no change, no message
        assert {(await watch.read()).status for watch in watches} == {SERVING if serving else NOT_SERVING}


@run_by(run)
async def test_a_watcher_that_takes_nothing_holds_no_change_up_and_no_end(server: GrpcServer, channel: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with deaf_call(server.port, f"/{SERVICE_NAME}/Watch".encode()):
        # The watch has begun once one that came later has.
        watch = stub.Watch(request())
        assert (await watch.read()).status == NOT_SERVING
        await asyncio.sleep(0.1)
        server.set_serving(True)
        assert (await watch.read()).status == SERVING
        assert (await stub.Check(request())).status == SERVING
        watch.cancel()
        await server.stop(0)


@pytest.mark.parametrize(
    "method",
    [
        f"{SERVICE_NAME}/Check",
        f"{SERVICE_NAME}/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
@run_by(run, reflection=True)
async def test_bytes_that_are_no_message_are_refused_by_grpcs_own_services_too(
    server: GrpcServer, channel: Any, *, method: str
) -> None:
    for sent in (b"\xff", b"\x0a\x01\xff"):
        call = channel.stream_stream(f"/{method}")(iter([sent]))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"must be the message of /{method}, but its bytes cannot be read" in await call.details()
        status = status_pb2.Status.FromString(dict(await call.trailing_metadata())[STATUS_DETAILS_KEY])
        assert status.details[1].Is(error_details_pb2.BadRequest.DESCRIPTOR)
    # A field that a later version of their contract may have.
    assert await channel.stream_stream(f"/{method}")(iter([b"\xc0\xa9\x07\x01"])).read()
