"""One reader of the prefix tables' changes. It never makes the engine loop wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice

from pagekv.common.errors import FellBehind
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored

# Changes that a reader may leave unread, those that come to nothing among them: some tens of megabytes.
MAX_UNREAD = 131_072


# Every block in the tables at the border where the watch began, each by itself, the device's first, parents before
# children there.
Snapshot = Iterator[Stored]


class TableWatch:
    """States: open → ended, by `close` (the reader went) or `fail` (told to the reader).

    What a reader has not taken yet grows into one net change, so a slow one sees fewer borders, each of them whole.
    """

    def __init__(self, snapshot: Snapshot, on_end: Callable[[TableWatch], None], max_unread: int = MAX_UNREAD) -> None:
        """`on_end` is called once, when it leaves the open state."""
        self._snapshot = snapshot
        # Of one border after the other, and their sizes added up.
        self._unread: list[Diff] = []
        self._size = 0
        self._max_unread = max_unread
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._on_end: Callable[[TableWatch], None] | None = on_end

    def push(self, diff: Diff) -> None:
        """Adds what changed up to a step border; called by the engine loop."""
        self._unread.append(diff)
        self._size += diff.size
        if self._size > self._max_unread:
            self.fail(FellBehind(f"more than {self._max_unread} changes were not read in time; start again"))
        else:
            self._ready.set()

    def take_snapshot(self, limit: int) -> list[Stored]:
        """The next blocks of the snapshot, `limit` at most and fewer only at its end; raises what ended the watch."""
        if self._error is not None:
            raise self._error
        return list(islice(self._snapshot, limit))

    async def take(self) -> Diff:
        """Waits for changes; raises what ended the watch."""
        while not (taken := self.take_unread()).size:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return taken

    def take_unread(self) -> Diff:
        """What changed by now, which may be nothing."""
        taken = Diff()
        for diff in self._unread:
            taken.extend(diff)
        taken.settle()
        self._unread, self._size = [], 0
        return taken

    def fail(self, error: Exception) -> None:
        """Ends it with an error for the reader, in place of what is unread."""
        self._error = error
        self.close()
        self._ready.set()

    def close(self) -> None:
        """Ends it and forgets what is unread. Idempotent."""
        self._unread, self._size = [], 0
        self._snapshot = iter(())
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None
