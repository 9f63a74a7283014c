"""Handlers of streams behind the server's interceptor: async generators, and coroutines that write by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from support.event_loop import run_by

from pagekv.common.errors import InvalidRequest
from pagekv.common.server import GrpcServer

SERVICE = "test.Streams"


def serialise(message: int) -> bytes:
    return b"%d" % message


async def generates(request: bytes, context: Any) -> AsyncIterator[int]:
    yield 1
    fail(request)


async def writes(request: bytes, context: Any) -> None:
    await context.write(b"1")
    fail(request)


def fail(request: bytes) -> None:
    if request == b"refuse":
        raise InvalidRequest("field", "must be better")
    if request == b"break":
        raise KeyError("a bug")


async def echoes(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def floods(request: bytes, context: Any) -> None:
    while True:
        await context.write(bytes(1 << 20))


def run(body: Callable[[Any, str], Awaitable[None]]) -> None:
    # The channel is Any: the type stubs know it by the messages of generated code.
    async def bounded() -> None:
        server = GrpcServer("127.0.0.1:0", [SERVICE], reflection=False)
        unary, both = grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        # Any: the type stubs know only blocking handlers.
        handlers: Any = {
            "Generates": (unary, generates),
            "Writes": (unary, writes),
            "Echoes": (both, echoes),
            "Floods": (unary, floods),
        }
        made = {name: make(handler, response_serializer=serialise) for name, (make, handler) in handlers.items()}
        server.server.add_registered_method_handlers(SERVICE, made)
        port = await server.start()
        try:
            async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await body(channel, f"127.0.0.1:{port}")
        finally:
            await server.stop(0)

    asyncio.run(bounded())


@pytest.mark.parametrize("name", ["Generates", "Writes"])
@pytest.mark.parametrize(
    ("request_bytes", "code", "words"),
    [
        (b"fine", grpc.StatusCode.OK, ""),
        (b"refuse", grpc.StatusCode.INVALID_ARGUMENT, "field: must be better"),
        (b"break", grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
@run_by(run)
async def test_an_error_comes_after_what_was_written(
    channel: Any, *, name: str, request_bytes: bytes, code: Any, words: str
) -> None:
    call = channel.unary_stream(f"/{SERVICE}/{name}")(request_bytes)
    assert await call.read() == b"1"
    assert await call.code() is code
    assert words in (await call.details() or "")


@run_by(run)
async def test_a_coroutine_answers_a_stream_of_requests(channel: Any) -> None:
    call = channel.stream_stream(f"/{SERVICE}/Echoes")(iter([b"a", b"b"]))
    assert [message async for message in call] == [b"a", b"b"]


def test_a_caller_that_goes_while_it_is_written_to_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def body(channel: Any, target: str) -> None:
        for _ in range(20):
            leaves: Any = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
            async with leaves:
                calls = [leaves.unary_stream(f"/{SERVICE}/Floods")(b"") for _ in range(8)]
                await asyncio.gather(*(call.read() for call in calls))
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.INFO, "pagekv"):
        run(body)
    assert "unexpected error" not in caplog.text
