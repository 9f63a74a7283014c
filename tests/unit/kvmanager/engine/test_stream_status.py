"""The status of an ended stream survives a write that fails in the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from support.engine.replaced_status import OF_THE_WRITE, SENT, ReplacedStatus
from support.event_loop import in_event_loop

from pagekv.kvmanager.engine import stream_status
from pagekv.kvmanager.engine.stream_status import StreamStatus


def _status(call: ReplacedStatus) -> StreamStatus:
    return StreamStatus(cast("grpc.aio.StreamStreamCall[Any, Any]", call))


def _same(error: grpc.aio.AioRpcError, other: grpc.aio.AioRpcError) -> bool:
    return (error.code(), error.details(), [*error.trailing_metadata()]) == (
        other.code(),
        other.details(),
        [*other.trailing_metadata()],
    )


@in_event_loop
async def test_a_status_that_a_failed_write_replaces_is_kept() -> None:
    call = ReplacedStatus()
    status = _status(call)
    call.set(SENT)
    assert _same(await status.sent(call.set(OF_THE_WRITE)), SENT)


@in_event_loop
async def test_a_status_that_no_write_replaces_is_that_of_the_error() -> None:
    call = ReplacedStatus()
    status = _status(call)
    assert await status.sent(call.set(SENT)) is SENT


@in_event_loop
async def test_a_status_that_comes_after_the_failed_write_is_waited_for() -> None:
    call = ReplacedStatus()
    status = _status(call)
    error = call.set(OF_THE_WRITE)
    asyncio.get_running_loop().call_later(stream_status.LATER_S / 10, call.set, SENT)
    assert _same(await status.sent(error), SENT)


@in_event_loop
async def test_a_failed_write_without_any_other_status_remains() -> None:
    call = ReplacedStatus()
    status = _status(call)
    assert _same(await status.sent(call.set(OF_THE_WRITE)), OF_THE_WRITE)


@in_event_loop
async def test_an_end_with_ok_is_no_reason_for_a_failed_write() -> None:
    call = ReplacedStatus()
    status = _status(call)
    call.set(grpc.aio.AioRpcError(grpc.StatusCode.OK, None, grpc.aio.Metadata(), ""))
    assert _same(await status.sent(call.set(OF_THE_WRITE)), OF_THE_WRITE)


@in_event_loop
async def test_callbacks_that_are_called_for_each_status_change_nothing() -> None:
    """As in other versions of gRPC."""
    call = ReplacedStatus()
    status = _status(call)
    call.set(SENT)
    status._keep(cast("Any", call))
    error = call.set(OF_THE_WRITE)
    status._keep(cast("Any", call))
    assert _same(await status.sent(error), SENT)


@pytest.mark.parametrize("words", ["step 3: RuntimeError", ""])
@in_event_loop
async def test_another_internal_error_is_the_executors_own(words: str) -> None:
    call = ReplacedStatus()
    status = _status(call)
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, None, grpc.aio.Metadata(), words)
    assert await status.sent(call.set(error)) is error


@in_event_loop
async def test_no_status_of_a_real_call_is_lost_to_a_write() -> None:
    """Without the class many of these statuses are lost. Once gRPC loses none, the class can go."""

    async def run(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""
            await context.abort(grpc.StatusCode.ABORTED, "taken over")

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(cast("Any", run))

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def write(call: Any) -> None:
        try:
            while True:
                await call.write(b"x")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(300):
            call: Any = channel.stream_stream("/service/Run")()
            status, writing = StreamStatus(call), asyncio.create_task(write(call))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
            error = await status.sent(raised.value)
            assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "taken over")
            await writing
    await server.stop(None)
