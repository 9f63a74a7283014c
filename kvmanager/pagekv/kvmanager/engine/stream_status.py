"""The status with which an executor ended its stream of steps, which gRPC may lose."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import grpc

T = TypeVar("T")

# The details of the status that gRPC's asyncio client gives a call when a write fails because the call is over. It
# replaces the status that the other side sent: https://github.com/grpc/grpc/issues/36066
FAILED_WRITE = "Internal error from Core"
# Seconds in which the other side's status arrives if the failed write came first.
LATER_S = 0.1


class StreamStatus:
    """Keeps the status that the other side sent, before a failed write can replace it. Used on the event loop only."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call = call
        self._kept: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    async def sent(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The error with the status that the other side sent. `error`, which ended the call, if none came, or OK."""
        if not _is_failed_write(error):
            return error
        if self._kept is None or _is_failed_write(self._kept):
            await asyncio.sleep(LATER_S)
            self._keep(self._call)
        return self._kept or error

    def _keep(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Called as soon as there is a status, and so synchronous: the next callback of the loop may replace it."""
        if self._kept is not None and not _is_failed_write(self._kept):
            return
        code = _at_once(call.code())
        if code is not grpc.StatusCode.OK:
            self._kept = grpc.aio.AioRpcError(code, None, _at_once(call.trailing_metadata()), _at_once(call.details()))


def _is_failed_write(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == FAILED_WRITE


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    finally:
        coroutine.close()
    raise RuntimeError("the call has no status yet")
