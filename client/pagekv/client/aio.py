"""The asyncio client. It has the methods of `pagekv.client.client`, which documents the errors that each raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar, Unpack

import grpc

from pagekv.client.calls import ClientCalls, StreamState
from pagekv.client.errors import FailedPrecondition, cancelled_here
from pagekv.client.generation_types import Chunk, GenerateOptions, Prompt
from pagekv.client.options import with_options_of
from pagekv.client.running_stream import RunningStream, task_is_cancelled
from pagekv.client.settings import WatchOptions
from pagekv.client.types import BlockInfo, BlockState, EventBatch, RequestInfo

__all__ = ["AsyncPageKVClient", "AsyncStream", "AsyncWatch"]

T = TypeVar("T")


class AsyncPageKVClient(ClientCalls):
    """A connection to a PageKV manager. It belongs to the event loop in which it is made, and is not for other threads
    or loops. Close it, or use it in an `async with` statement. Like `PageKVClient`, make one in each process. Raises
    FailedPrecondition outside a running event loop, and in an event loop other than its own.

    Cancelling a task that generates aborts its request. Raises the same errors as `PageKVClient`.
    """

    _library: ClassVar[ModuleType] = grpc.aio
    _new_event: ClassVar[type[Any]] = asyncio.Event

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError as error:
            problem = "an asyncio client must be made and used in a running event loop: inside async def"
            raise FailedPrecondition(problem, "EVENT_LOOP", self.target) from error

    def _carry_out(self, steps: Coroutine[Any, Any, Any]) -> Any:
        return steps

    async def _wait_for(self, begun: Any) -> Any:
        try:
            return await begun
        except asyncio.CancelledError as error:
            if task_is_cancelled():
                raise
            raise cancelled_here(self.target) from error

    async def _pause(self, event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)

    def _messages(self, call: Any) -> AsyncIterator[Any]:
        return aiter(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection unless it was given as `channel`; calls still running raise Cancelled. Idempotent."""
        if self._owns_channel:
            self._pauses.close()
            for channel in self._channels():
                await channel.close()

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generates and yields chunks as they arrive. Closing the stream, or cancelling its task, aborts the request.

        The call starts when the first chunk is requested. A broken connection is resumed as in `PageKVClient.stream`.
        """
        return AsyncStream(self._begin(prompt, n, options))

    def iter_requests(self) -> AsyncGenerator[RequestInfo]:
        """The live requests, as in `PageKVClient.iter_requests`."""
        return self._requests()

    def iter_blocks(self, state: BlockState | None = None) -> AsyncGenerator[BlockInfo]:
        """The blocks of the pool, as in `PageKVClient.iter_blocks`."""
        return self._blocks(state)

    @with_options_of(WatchOptions)
    def watch_events(self, **options: Unpack[WatchOptions]) -> AsyncWatch:
        """The changes of the prefix tables, as in `PageKVClient.watch_events`."""
        return AsyncWatch(self._begin_watch(options))


class _Closable(AsyncIterator[T]):
    """Items as they arrive, until there are no more or another task closes it."""

    def __init__(self, running: RunningStream[T, Any]) -> None:
        self._running = running
        # Any: the stubs have no `ag_running`.
        self._items: Any = running.items()

    async def __anext__(self) -> T:
        item: T = await anext(self._items)
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the call; a request that has not ended is aborted. Idempotent, and may be called from any task: an
        iteration in another task stops as at the end of the stream.
        """
        self._running.end()
        if not self._items.ag_running:
            await self._items.aclose()


class AsyncWatch(_Closable[EventBatch]):
    """Like `Watch`, for `async with`."""


class AsyncStream(StreamState, _Closable[Chunk]):
    """Like `Stream`, for `async with`."""
