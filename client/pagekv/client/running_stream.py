"""A stream of answers and the call that carries it. It may be ended from any thread or task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from pagekv.client.connection import Connection
from pagekv.client.errors import PageKVError, cancelled_here, from_rpc_error

Item = TypeVar("Item")
ItemOut = TypeVar("ItemOut", covariant=True)


def task_is_cancelled() -> bool:
    """Whether a CancelledError is meant for the current task. grpc.aio also raises one where a task waits for a call
    that another task has ended.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Resumable(Protocol[ItemOut]):
    """One stream as its caller sees it, over as many calls as needed, without I/O: a generation or a watch."""

    @property
    def done(self) -> bool:
        """Whether everything has come."""

    def request(self) -> Any:
        """The message for the next call."""

    def remaining_s(self) -> float | None:
        """Seconds that the next call may take."""

    def take(self, response: Any, /) -> Iterable[ItemOut]:
        """Takes a message of the call and returns the items that the caller gets."""

    def ended(self) -> None:
        """Called when the server has closed the stream without an error. Raises PageKVError if that was too early."""

    def failed(self, error: PageKVError) -> float:
        """Called when the call failed. Returns the seconds to wait before the next call; raises the error if there is
        to be none.
        """


State = TypeVar("State", bound=Resumable[Any])


class RunningStream(Generic[Item, State]):
    """States: running → ended, by itself, by an error or by `end`. `begin` starts a call, given a request and a time
    limit in seconds.
    """

    def __init__(self, client: Connection, resumable: State, begin: Callable[[Any, float | None], Any]) -> None:
        self._client, self.resumable, self._begin = client, resumable, begin
        self._call: Any = None
        self.was_ended = False
        # Set to end a pause between two calls.
        self._awake = client._new_event()

    def end(self) -> None:
        """Cancels the call: a wait for the next item ends as if the stream had ended. Idempotent."""
        # First: a call that begins meanwhile either sees it or is already in `_call`.
        self.was_ended = True
        self._awake.set()
        if self._call is not None:
            self._call.cancel()

    async def items(self) -> AsyncGenerator[Item]:
        """The items, over as many calls as needed. Raises PageKVError."""
        resumable = self.resumable
        while not resumable.done and not self.was_ended:
            try:
                call = self._call = self._begin(resumable.request(), resumable.remaining_s())
                try:
                    if not self.was_ended:
                        async for response in self._client._messages(call):
                            for item in resumable.take(response):
                                yield item
                finally:
                    # Ends the call if the caller gave up; has no effect on a call that has ended.
                    call.cancel()
                if not self.was_ended:
                    resumable.ended()
            except (grpc.RpcError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and task_is_cancelled():
                    raise
                if not resumable.done and not self.was_ended:
                    target = self._client.target
                    known = (
                        from_rpc_error(error, target) if isinstance(error, grpc.RpcError) else cancelled_here(target)
                    )
                    pause_s = resumable.failed(known)
                    await self._client._rest(self._awake, pause_s)
                    if self._client._pauses.closed and not self.was_ended:
                        raise cancelled_here(target) from error
