"""The order in which the readers of streams are woken: a few at a time, first come, first served.

A step hands out hundreds of tokens at once, and writing a message costs many times what planning a step does. Woken all
together, their readers would keep the event loop for longer than a step lasts, and the executor would wait for the next
one. Woken a few at a time, the engine's turn comes after a few messages, however many readers are due. One that waits
for its turn meanwhile finds more tokens when it comes: they go into one message.

Why turns are left out: gRPC tells asyncio of everything that has ended (a message written, a result read) by one byte
through a socket, and takes one byte from it in every turn of the loop. The socket holds 278 (Linux, default buffers).
Where more comes than turns go by it fills up, and gRPC's thread stands still until three quarters of it have been
taken. The result that the engine waits for comes behind that: up to 80 ms later, where 256 streams were written to.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A turn lasts for about 200 microseconds then, and a result passes through three of them on its way to the next step.
READERS_AT_ONCE = 4


class Fanout:
    """Readers that are due. States: idle, or turning as long as `_turn` is called in every turn of the event loop."""

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()
        self._turning = False
        # Turns to leave out.
        self._pauses = 0

    def add(self, reader: asyncio.Future[None]) -> None:
        """Wakes a reader when its turn comes, unless it has been cancelled by then."""
        self._due.append(reader)
        if not self._turning:
            self._turning = True
            reader.get_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if self._pauses:
            self._pauses -= 1
        else:
            self._pauses = self._wake()
            if not self._pauses:
                self._turning = False
                return
        asyncio.get_running_loop().call_soon(self._turn)

    def _wake(self) -> int:
        """Wakes the first few; how many there were."""
        woken = 0
        while self._due and woken < READERS_AT_ONCE:
            reader = self._due.popleft()
            if not reader.done():
                reader.set_result(None)
                woken += 1
        return woken
