"""The blocking client. `pagekv.client.aio` is its asyncio twin: the same methods, one suite of tests."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar, Unpack

import grpc

from pagekv.client.calls import ClientCalls, StreamState
from pagekv.client.generation_types import Chunk, GenerateOptions, Prompt
from pagekv.client.options import with_options_of
from pagekv.client.running_stream import RunningStream
from pagekv.client.settings import WatchOptions
from pagekv.client.types import BlockInfo, BlockState, EventBatch, RequestInfo

__all__ = ["PageKVClient", "Stream", "Watch"]

T = TypeVar("T")


def _carry_out(steps: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits for an event loop, because everything that it awaits blocks.

    Its generators stay out of an event loop of this thread, whose turn the caller may block: a loop closes all
    generators that it knows when it ends, and a stream that is read on afterwards would look complete.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    raise AssertionError("a coroutine of the blocking client waits")


async def _next_of(items: AsyncGenerator[T]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[Any]) -> None:
    await items.aclose()


def _one_by_one(items: AsyncGenerator[T]) -> Generator[T]:
    """The items of an asynchronous generator that never waits for an event loop. Closing this generator closes that
    one.
    """
    try:
        while True:
            yield _carry_out(_next_of(items))
    except StopAsyncIteration:
        return
    finally:
        _carry_out(_close(items))


class PageKVClient(ClientCalls):
    """A connection to a PageKV manager, for use by any number of threads. Close it, or use it in a `with` statement.

    It is one HTTP/2 connection, on which a manager accepts 4,096 calls at once; further calls wait. A client made
    before a fork (of multiprocessing, or of a server that loads the application first) does not work after it: make one
    in each process.

    Every method raises subclasses of `pagekv.client.errors.PageKVError`: InvalidRequest names the wrong field,
    Overloaded and Unavailable say when to retry, Unreachable says that nothing answers at the address.
    """

    _library: ClassVar[ModuleType] = grpc
    _new_event: ClassVar[type[Any]] = threading.Event
    _carry_out = staticmethod(_carry_out)

    def _running_loop(self) -> None:
        """None: for any thread."""

    async def _wait_for(self, begun: Any) -> Any:
        return begun

    async def _pause(self, event: threading.Event, seconds: float) -> None:
        event.wait(seconds)

    async def _messages(self, call: Any) -> AsyncIterator[Any]:
        for message in call:
            yield message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection unless it was given as `channel`; calls still running raise Cancelled. Idempotent."""
        if self._owns_channel:
            self._pauses.close()
            for channel in self._channels():
                channel.close()

    def stream(self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]) -> Stream:
        """Generates and yields chunks as they arrive. Closing the stream aborts the request.

        The call starts with the first `next`. A broken connection is resumed without a token lost or repeated;
        with `n` above 1 the server computes again what was received. Options: those of `generate`.
        """
        return Stream(self._begin(prompt, n, options))

    def iter_requests(self) -> Generator[RequestInfo]:
        """The live requests, running requests first, page by page. Requests that arrive, end or change state meanwhile
        may be missing or appear twice.
        """
        return _one_by_one(self._requests())

    def iter_blocks(self, state: BlockState | None = None) -> Generator[BlockInfo]:
        """The blocks of the pool, ordered by id, page by page, only those in `state` if given."""
        return _one_by_one(self._blocks(state))

    @with_options_of(WatchOptions)
    def watch_events(self, **options: Unpack[WatchOptions]) -> Watch:
        """The changes of the prefix tables: first a snapshot, then a batch at every step boundary with changes.

        `TableReplica` applies the batches. The watch continues until it is closed, from any thread, or ends after the
        snapshot with `snapshot_only`. After a broken connection it continues after the last complete batch. Raises
        RevisionGone when the server no longer keeps the changes, or is a different one, and FellBehind when batches are
        read too slowly: watch again from a snapshot.
        """
        return Watch(self._begin_watch(options))


class _Closable(Iterator[T]):
    """Items as they arrive, until there are no more or another thread closes it."""

    def __init__(self, running: RunningStream[T, Any]) -> None:
        self._running = running
        self._items = _one_by_one(running.items())

    def __next__(self) -> T:
        try:
            return next(self._items)
        except ValueError:
            # Another thread runs the generator, to close it.
            if self._running.was_ended:
                raise StopIteration from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the call; a request that has not ended is aborted. Idempotent, and may be called from any thread: an
        iteration in another thread stops as at the end of the stream.
        """
        self._running.end()
        # ValueError: another thread runs the generator, and leaves it now because its call is cancelled.
        with suppress(ValueError):
            self._items.close()


class Watch(_Closable[EventBatch]):
    """Batches of changes of the prefix tables. Use it in a `with` statement, or close it.

    States: open → ended (every batch was delivered, or an error was raised) or closed.
    """


class Stream(StreamState, _Closable[Chunk]):
    """Chunks of a running generation; at the end `completion` has the whole result. Use it in a `with` statement, or
    close it.

    States: open → ended (every chunk was delivered, or an error was raised) or closed (the request is aborted).
    """
