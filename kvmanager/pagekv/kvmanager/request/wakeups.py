"""Paces the readers of streams: a few are woken at a time, first come, first served.

A step gives tokens to hundreds of readers at once, and writing their messages takes much longer than planning a step.
If all readers were woken together, they would keep the event loop busy for longer than a step lasts, and the executor
would wait for the next step. With a few at a time the engine's turn comes after a few messages, however many readers
are due, and tokens that arrive before a reader's turn go into the same message.

After each few readers some turns of the event loop are skipped. gRPC reports everything that has ended (a message
written, a result read) to asyncio with one byte through a socket, and reads one byte in every turn of the loop. The
socket holds 278 bytes (Linux, default buffers). If more ends than turns go by, it fills up, and gRPC's thread stands
still until three quarters of it have been read. The result that the engine waits for is then late: by up to 80 ms after
writes to 256 streams.
"""

from __future__ import annotations

import asyncio
from collections import deque

# With so many readers a turn takes about 250 microseconds; three turns lie between a result and the next step.
READERS_AT_ONCE = 6


class Wakeups:
    """The readers that are due. States: idle; turning, while `_turn` is called in every turn of the event loop."""

    def __init__(self) -> None:
        # The loop that all readers run on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: deque[asyncio.Future[None]] = deque()
        self._turning = False
        # Turns still to skip.
        self._pauses = 0

    def reader(self) -> asyncio.Future[None]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    def add(self, reader: asyncio.Future[None]) -> None:
        """Resolves a future of `reader()` when its turn comes, unless it is cancelled by then."""
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
