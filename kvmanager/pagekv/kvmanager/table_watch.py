"""One reader of the prefix tables' changes. It never makes the engine loop wait."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from pagekv.common.errors import FellBehind
from pagekv.kvmanager.table_diff import Key, TableDiff

# Changes that a reader may leave unread: some tens of megabytes.
MAX_UNREAD = 131_072


class StoredBlock(NamedTuple):
    """A block that entered a table; digests are 32 bytes, `parent` is that of the block or chain root before it."""

    parent: bytes
    token_ids: array[int]


Diff = TableDiff[StoredBlock]
# Every block in the tables at the border where the watch began, the device's first, parents before children there.
Snapshot = Iterator[tuple[Key, StoredBlock]]


class TableWatch:
    """States: open → ended, by `close` (the reader went) or `fail` (told to the reader).

    What a reader has not taken yet grows into one net change, so a slow one sees fewer borders, each of them whole.
    """

    def __init__(self, snapshot: Snapshot, on_end: Callable[[TableWatch], None], max_unread: int = MAX_UNREAD) -> None:
        """`on_end` is called once, when it leaves the open state."""
        self._snapshot = snapshot
        self._unread = Diff()
        self._max_unread = max_unread
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._on_end: Callable[[TableWatch], None] | None = on_end

    def push(self, diff: Diff) -> None:
        """Adds what changed up to a step border; called by the engine loop."""
        self._unread.extend(diff)
        if len(self._unread) > self._max_unread:
            self.fail(FellBehind(f"more than {self._max_unread} changes were not read in time; start again"))
        elif self._unread:
            self._ready.set()

    def take_snapshot(self, limit: int) -> list[tuple[Key, StoredBlock]]:
        """The next blocks of the snapshot, `limit` at most and fewer only at its end; raises what ended the watch."""
        if self._error is not None:
            raise self._error
        return list(islice(self._snapshot, limit))

    async def take(self) -> Diff:
        """Waits for changes; raises what ended the watch."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        taken, self._unread = self._unread, Diff()
        return taken

    def fail(self, error: Exception) -> None:
        """Ends it with an error for the reader, in place of what is unread."""
        self._error = error
        self.close()
        self._ready.set()

    def close(self) -> None:
        """Ends it and forgets what is unread. Idempotent."""
        self._unread = Diff()
        self._snapshot = iter(())
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None
