"""A gate before every step of an executor process: what has to come together does, on a machine of any speed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from support.clients.calls import Caller

T = TypeVar("T")


class Gate:
    """Open until `shut`. While it is shut a step waits before it begins, the executor answering everything else, unless
    `let_through` has made room for it; a gate whose owner has died is open.

    It is a FIFO of which every step takes a byte: without a writer there is nothing to wait for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: int | None = None
        os.mkfifo(path)

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Shut for as long as the context lasts."""
        assert self._writer is None, "shut already"
        # Not write-only: that waits for a reader, and breaks when the reader is killed.
        self._writer = os.open(self.path, os.O_RDWR)
        try:
            yield
        finally:
            os.close(self._writer)
            self._writer = None

    def let_through(self, steps: int) -> None:
        """So many steps more."""
        assert self._writer is not None, "not shut"
        os.write(self._writer, bytes(steps))

    async def pass_through(self, steps: int, caller: Caller) -> None:
        """So many steps more; returns when the manager knows their results."""
        before = (await caller.stats()).steps_total
        self.let_through(steps)
        await caller.stats_when(lambda stats: stats.steps_total >= before + steps)


@asynccontextmanager
async def standing(
    gate: Gate, caller: Caller, calls: Sequence[Coroutine[Any, Any, T]], steps: int = 0
) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Generate calls under way, accepted by the manager in this order, while the executor stands still: so many steps
    have been computed since the last of them was accepted, and no more are before the context ends.
    """
    before = await caller.stats()
    with gate.shut():
        tasks: list[asyncio.Task[T]] = []
        for call in calls:
            tasks.append(asyncio.create_task(call))
            await caller.stats_when(lambda stats: stats.requests_total == before.requests_total + len(tasks))
        await gate.pass_through(steps, caller)
        yield tasks


async def at_once(gate: Gate, caller: Caller, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of Generate calls, all of which the manager has accepted before the executor computes the first step."""
    async with standing(gate, caller, calls) as tasks:
        pass
    return list(await asyncio.gather(*tasks))
