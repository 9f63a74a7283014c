"""A gate before every step of an executor process: what has to come together does, on a machine of any speed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
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


async def at_once(gate: Gate, caller: Caller, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of Generate calls, all of which the manager has accepted before the executor computes the first step."""
    accepted = (await caller.stats()).requests_total
    with gate.shut():
        tasks = [asyncio.create_task(call) for call in calls]
        await caller.stats_when(lambda stats: stats.requests_total == accepted + len(tasks))
    return list(await asyncio.gather(*tasks))
