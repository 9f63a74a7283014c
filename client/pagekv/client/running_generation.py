"""A generation with the call that carries it, which may be ended from any thread or task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from pagekv.client.connection import Connection
from pagekv.client.errors import from_rpc_error
from pagekv.client.generation_types import Chunk
from pagekv.client.resumable_generation import ResumableGeneration


class RunningGeneration:
    """States: running → ended, by itself, by an error or by `end`.

    `begin` makes the call for a request, with a time limit in seconds.
    """

    def __init__(
        self, client: Connection, generation: ResumableGeneration, begin: Callable[[Any, float | None], Any]
    ) -> None:
        self._client, self._generation, self._begin = client, generation, begin
        self._call: Any = None
        self._ended = client.new_event()

    def end(self) -> None:
        """Aborts the request: a wait for its next chunk finds that there is none. Idempotent."""
        # The event first: a call that begins meanwhile sees it, or is here already.
        self._ended.set()
        if self._call is not None:
            self._call.cancel()

    @property
    def was_ended(self) -> bool:
        """`end` was called."""
        ended: bool = self._ended.is_set()
        return ended

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """The chunks, over as many calls as it takes. Raises PageKVError."""
        generation = self._generation
        while not generation.done and not self.was_ended:
            try:
                call = self._call = self._begin(generation.request(), generation.remaining_s())
                try:
                    if not self.was_ended:
                        async for response in self._client.messages(call):
                            chunk = generation.take(response)
                            if chunk is not None:
                                yield chunk
                finally:
                    # Aborts the request when the caller gave up; no effect on a call that has ended.
                    call.cancel()
                if not self.was_ended:
                    generation.ended()
            except grpc.RpcError as error:
                if not generation.done and not self.was_ended:
                    pause_s = generation.failed(from_rpc_error(error, self._client.target))
                    await self._client.pause(self._ended, pause_s)
            except asyncio.CancelledError:
                # grpc.aio tells the reader of a cancelled call so, as if the reader's own task were cancelled.
                task = asyncio.current_task()
                if not self.was_ended or (task is not None and task.cancelling()):
                    raise
