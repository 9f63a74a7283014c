"""A reader of the prefix tables' changes, which never makes the engine loop wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

from pagekv.common.errors import FellBehind
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored
from pagekv.kvmanager.kvcache.events.snapshot import Snapshot

# Changes that a reader may leave unread, including changes that cancel out: some tens of megabytes.
MAX_UNREAD = 131_072


class TableWatch:
    """States: open → ended, by `close` (the reader is gone) or `fail` (the reader gets an error).

    Unread changes become one net change when they are taken, so a slow reader sees fewer step boundaries, but each
    completely.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        on_end: Callable[[TableWatch], None],
        revision: int,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        """`on_end` is called once. `revision`: the snapshot's, or the one after which the changes begin."""
        # The revision of the tables that a reader has once it has applied what it took.
        self.revision = self._pushed = revision
        self._snapshot = snapshot
        self._unread = Diff()
        self._max_unread = max_unread
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._on_end: Callable[[TableWatch], None] | None = on_end

    def push(self, diff: Diff, revision: int) -> None:
        """Adds the changes up to a step boundary, which made this revision; called by the engine loop."""
        self._unread.extend(diff)
        self._pushed = revision
        if self._unread.size > self._max_unread:
            self.fail(FellBehind(f"more than {self._max_unread} changes were not read in time; start again"))
        else:
            self._ready.set()

    def take_snapshot(self, limit: int) -> list[Stored]:
        """The snapshot's next blocks, fewer than `limit` only at the end. Raises what ended the watch."""
        if self._error is not None:
            raise self._error
        return list(islice(self._snapshot, limit))

    async def take(self) -> Diff:
        """Waits for changes; raises the error that ended the watch."""
        while not (taken := self.take_unread()).size:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return taken

    def take_unread(self) -> Diff:
        """Takes the changes so far, possibly none."""
        taken, self._unread = self._unread, Diff()
        self.revision = self._pushed
        taken.settle()
        return taken

    def fail(self, error: Exception) -> None:
        """Ends the watch with an error for the reader, in place of the unread changes."""
        self._error = error
        self.close()
        self._ready.set()

    def close(self) -> None:
        """Ends the watch and discards what is unread. Idempotent."""
        self._unread = Diff()
        self._snapshot = iter(())
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None
