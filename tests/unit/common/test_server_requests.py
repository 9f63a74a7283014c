"""Calls whose request does not come: admitted and counted at their headers, and ended after a while."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.clients.deaf_client import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, headers
from support.event_loop import run_by, until

from pagekv.common import server
from pagekv.common.errors import PageKVError, PermissionDenied
from pagekv.common.server import GrpcServer

RST_STREAM, CANCEL = 3, 8
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
MESSAGE = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()


class Open:
    """Admits every call but those of `refused`, and counts those that are open."""

    def __init__(self) -> None:
        self.refused = ""
        self.calls: list[str] = []
        # Methods of calls that ended with an error, and its words.
        self.errors: list[tuple[str, str]] = []

    async def admit(self, method: str, context: Any) -> None:
        if method == self.refused:
            raise PermissionDenied("not you")
        self.calls.append(method)
        context.add_done_callback(lambda _: self.calls.remove(method))

    def told(self, method: str, context: Any, error: PageKVError) -> None:
        self.errors.append((method, str(error)))


def run(body: Callable[[Open, int], Awaitable[None]], *, reflection: bool = False) -> None:
    async def main() -> None:
        calls = Open()
        it = GrpcServer("127.0.0.1:0", [], reflection=reflection, admit=calls.admit, refused=calls.told)
        port = await it.start()
        try:
            async with asyncio.timeout(120):
                await body(calls, port)
        finally:
            await it.stop(0)

    asyncio.run(main())


def headers_alone(port: int, method: bytes, flags: int = 0) -> socket.socket:
    """A connection with one call that has sent its headers."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(PREFACE + frame(SETTINGS) + frame(HEADERS, END_HEADERS | flags, 1, headers(method)))
    connection.setblocking(False)
    return connection


async def told(connection: socket.socket, words: bytes) -> None:
    """Returns when the words have come; headers are literals, which are read without a table."""
    answered = b""
    while words not in answered:
        more = await asyncio.get_running_loop().sock_recv(connection, 4096)
        assert more, answered
        answered += more


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_a_call_counts_from_its_headers_on_and_ends_without_its_request(
    method: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(calls: Open, port: int) -> None:
        with headers_alone(port, method) as connection:
            await until(lambda: calls.calls == [method.decode()])
            await told(connection, b"no request came within 0.3 s")
            await until(lambda: not calls.calls)

    monkeypatch.setattr(server, "IDLE_MS", 300)
    run(body)


@pytest.mark.parametrize("requests", [0, 2])
def test_reflection_ends_without_a_next_request(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(calls: Open, port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            for left in reversed(range(requests)):
                if not left:
                    # From the wait behind this request on.
                    monkeypatch.setattr(server, "IDLE_MS", 300)
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                assert (await call.read()).list_services_response.service
            with pytest.raises(grpc.aio.AioRpcError, match=r"no request came within 0\.3 s"):
                await call.read()
        await until(lambda: not calls.calls)

    if not requests:
        monkeypatch.setattr(server, "IDLE_MS", 300)
    run(body, reflection=True)


@pytest.mark.parametrize("method", [CHECK, WATCH])
@run_by(run)
async def test_a_call_that_is_refused_need_not_send_its_request(calls: Open, port: int, *, method: bytes) -> None:
    calls.refused = method.decode()
    with headers_alone(port, method) as connection:
        await told(connection, b"not you")
    assert not calls.calls
    assert calls.errors == [(method.decode(), "not you")]


@pytest.mark.parametrize("method", [CHECK, WATCH])
@run_by(run)
async def test_a_call_that_ends_without_a_request_is_told_so(calls: Open, port: int, *, method: bytes) -> None:
    with headers_alone(port, method, END_STREAM) as connection:
        await told(connection, b"the call ended without a request")
    await until(lambda: not calls.calls)


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_callers_that_leave_before_their_request_are_counted_no_more(
    method: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(calls: Open, port: int) -> None:
        with headers_alone(port, method) as resets, headers_alone(port, method):
            await until(lambda: len(calls.calls) == 2)
            resets.send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
            await until(lambda: len(calls.calls) == 1)
        await until(lambda: not calls.calls)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest())

    with caplog.at_level(logging.INFO):
        run(body)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_connection_has_so_many_streams_whoever_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for health, which is open to all and counted by nobody."""

    async def body(calls: Open, port: int) -> None:
        with headers_alone(port, WATCH) as connection:
            for stream in (3, 5, 7):
                connection.send(frame(HEADERS, END_HEADERS, stream, headers(WATCH)))
            # For whatever reason: it depends on whether the caller has acknowledged the server's settings.
            await told(connection, frame(RST_STREAM, 0, 7, bytes(4))[:-4])
            await until(lambda: len(calls.calls) == 3)

    monkeypatch.setattr(server, "SERVER_OPTIONS", [*server.SERVER_OPTIONS, ("grpc.max_concurrent_streams", 3)])
    run(body)


@run_by(run)
async def test_a_request_that_comes_in_pieces_is_answered(
    calls: Open, port: int, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    with headers_alone(port, CHECK) as connection:
        loop = asyncio.get_running_loop()
        message = struct.pack(">BI", 0, len(MESSAGE)) + MESSAGE
        for at in range(len(message)):
            await loop.sock_sendall(connection, frame(DATA, 0, 1, message[at : at + 1]))
            await asyncio.sleep(0.01)
        # Nobody waits for the end of what the caller sends.
        await told(connection, b"no service 'nobody' here")
