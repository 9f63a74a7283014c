"""One Run call between the event loop and the worker thread: bounds the steps in flight and delivers their results in
order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.step import ExecutedStep

# The most steps that were read and not yet answered. At this bound the stream is not read, so the manager's writes
# wait.
MAX_IN_FLIGHT = 8


class StepStream:
    """One Run call. States: open, then ended by an error, by a clean end of input or by `Session.close_stream`. Used on
    the event loop only.

    `epoch` is the epoch that the call or its first step named, None before that. An open stream holds its epoch against
    other managers.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.closed = False
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        # Results in order; then the end of the stream, an exception or None.
        self._outcomes: asyncio.Queue[ExecutedStep | Exception | None] = asyncio.Queue()

    async def wait_for_room(self) -> None:
        """Waits until one more step may be in flight, and counts it as such."""
        await self._room.acquire()

    def deliver(self, outcome: ExecutedStep | Exception | None) -> None:
        """Adds the outcome of the oldest step in flight, or the end of the stream."""
        self._outcomes.put_nowait(outcome)

    async def reports(self) -> AsyncIterator[ExecutedStep]:
        """The results of the steps, in order. A step counts as answered when the next result is asked for. Raises the
        error that ended the stream.
        """
        while (outcome := await self._outcomes.get()) is not None:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            self._room.release()
