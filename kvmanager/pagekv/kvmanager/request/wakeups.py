"""The order in which the readers of streams are woken: a few at a time, first come, first served.

A step hands out hundreds of tokens at once, and writing a message costs many times what planning a step does. Woken all
together, their readers would keep the event loop for longer than a step lasts, and the executor would wait for the next
one. Woken a few at a time, the engine's turn comes after a few messages, however many readers are due. Until a reader's
message is made, more tokens go into it.

Why messages are made here, several in a row, and not by their readers: between two messages gRPC runs, and after it the
processor's caches hold little of what makes a message. Made in a row they take less (3 of 75 microseconds a token).

Why turns are left out: gRPC tells asyncio of everything that has ended (a message written, a result read) by one byte
through a socket, and takes one byte from it in every turn of the loop. The socket holds 278 (Linux, default buffers).
Where more comes than turns go by it fills up, and gRPC's thread stands still until three quarters of it have been
taken. The result that the engine waits for comes behind that: up to 80 ms later, where 256 streams were written to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

# A turn lasts for about 250 microseconds then, and a result passes through three of them on its way to the next step.
READERS_AT_ONCE = 6
# So many readers' messages are made in a row, which takes about as long.
MADE_AT_ONCE = 3 * READERS_AT_ONCE


class Fanout:
    """Readers that are due. States: idle, or turning as long as `_turn` is called in every turn of the event loop."""

    def __init__(self) -> None:
        # Of all readers.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        # Before these: readers with what was made for them, or the error of making it.
        self._made: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._turning = False
        # Turns to leave out.
        self._pauses = 0

    def reader(self) -> asyncio.Future[Any]:
        """What a reader is to wait for."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    def add(self, reader: asyncio.Future[Any], make: Callable[[], Any]) -> None:
        """Wakes one of `reader()` with what `make` returns or raises when its turn comes, unless it is cancelled by
        then. `make` is called in a row with others' and must not take long.
        """
        self._due.append((reader, make))
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
        """Wakes the first few; how many there were."""
        woken = 0
        while woken < READERS_AT_ONCE:
            if not self._made:
                self._make()
            if not self._made:
                break
            reader, made = self._made.popleft()
            if reader.done():
                continue
            if isinstance(made, Exception):
                reader.set_exception(made)
            else:
                reader.set_result(made)
            woken += 1
        return woken

    def _make(self) -> None:
        """Makes what the next few are woken with."""
        while self._due and len(self._made) < MADE_AT_ONCE:
            reader, make = self._due.popleft()
            if reader.done():
                continue
            try:
                self._made.append((reader, make()))
            except StopIteration as error:
                self._made.append((reader, RuntimeError(f"{error!r} where a message was made")))  # no future takes it
            except Exception as error:
                self._made.append((reader, error))
