"""Paces the readers of streams: a few are woken at a time, first come, first served.

A step hands out hundreds of tokens at once, and writing a message costs many times what planning a step does. Readers
that are woken all together keep the event loop busy for longer than a step lasts, and the executor waits for the next
step. With a few at a time the engine's turn comes after a few messages, however many readers are due, and tokens that
arrive before a reader's turn go into the same message.

Turns of the event loop are left out because gRPC tells asyncio of everything that has ended (a message written, a
result read) by one byte through a socket, and takes one byte from it in every turn of the loop. The socket holds 278
(Linux, default buffers). Where more comes than turns go by the socket fills up, and gRPC's thread stands still until
three quarters of it have been taken. The result that the engine waits for comes behind that: up to 80 ms later, where
256 streams were written to.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A turn then lasts for about 250 microseconds, and a result passes through three of them on its way to the next step.
READERS_AT_ONCE = 6


class Wakeups:
    """Readers that are due. States: idle, or turning while `_turn` is called in every turn of the event loop."""

    def __init__(self) -> None:
        # The loop that all readers run on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: deque[asyncio.Future[None]] = deque()
        self._turning = False
        # Turns to leave out.
        self._pauses = 0

    def reader(self) -> asyncio.Future[None]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    def add(self, reader: asyncio.Future[None]) -> None:
        """Resolves one of `reader()` when its turn comes, unless it is cancelled by then."""
        self._due.append(reader)
        if not self._turning:
            self._turning = True
            self._soon()

    def _turn(self) -> None:
        if self._pauses:
            self._pauses -= 1
        else:
            self._pauses = self._wake()
            if not self._pauses:
                self._turning = False
                return
        self._soon()

    def _soon(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._turn)

    def _wake(self) -> int:
        """Wakes the first few readers; returns how many there were."""
        woken = 0
        while self._due and woken < READERS_AT_ONCE:
            reader = self._due.popleft()
            if not reader.done():
                reader.set_result(None)
                woken += 1
        return woken
