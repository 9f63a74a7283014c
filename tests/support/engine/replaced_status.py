"""A call whose status gRPC's asyncio client replaces, as it does when a write fails because the call is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from pagekv.kvmanager.engine.stream_status import FAILED_WRITE

SENT = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, None, grpc.aio.Metadata(("key", "value")), "taken over")
OF_THE_WRITE = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, None, grpc.aio.Metadata(), FAILED_WRITE)


class ReplacedStatus:
    """A call whose status a test sets, as often as gRPC does."""

    def __init__(self) -> None:
        self._status: grpc.aio.AioRpcError | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._ended = asyncio.Event()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def set(self, status: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        self._status = status
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()
        self._ended.set()
        return status

    async def __aiter__(self) -> AsyncIterator[NoReturn]:
        """Ends as a stream of results does: with the latest status, in a later turn of the event loop."""
        await self._ended.wait()
        raise await self._now()
        yield

    def cancel(self) -> None:
        pass

    async def _now(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        return self._status

    async def code(self) -> grpc.StatusCode:
        return (await self._now()).code()

    async def details(self) -> str | None:
        return (await self._now()).details()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return (await self._now()).trailing_metadata()
