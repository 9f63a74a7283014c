"""A reader of the prefix tables' changes, which never makes the engine loop wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from pagekv.common.errors import FellBehind
from pagekv.kvmanager.kvcache.block_hash import Root
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored, Tier
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Names, PrefixTable
from pagekv.kvmanager.kvcache.table_columns import TableColumns

# Changes that a reader may leave unread, including changes that cancel out: some tens of megabytes.
MAX_UNREAD = 131_072

# Every block in the tables at the step boundary where the watch began, one by one: first the device's, parents before
# children, then the host's.
Snapshot = Iterator[Stored]


class TableWatch:
    """States: open → ended, by `close` (the reader is gone) or `fail` (the reader gets an error).

    Unread changes become one net change when they are taken, so a slow reader sees fewer step boundaries, each whole.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        on_end: Callable[[TableWatch], None],
        revision: int,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        """`on_end` is called once, when the watch leaves the open state. `revision` is that of the snapshot, or that
        from which the changes lead on.
        """
        # Of the tables, as the reader has them once it has applied what was taken.
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
        """The next blocks of the snapshot, `limit` at most, fewer only at the end; raises the error that ended the
        watch.
        """
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
        """The changes so far, possibly none."""
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


def take_snapshot(table: PrefixTable, host: HostPool | None = None) -> Snapshot:
    """Every block in the tables now: first the device's, parents before children, then the host's, where a block's
    parent may come later, or not at all.

    Only the copy of the columns is made here; blocks are put together one by one as the iterator is read.
    """
    device = _device_blocks(table.columns())
    return device if host is None or not host.num_cached else chain(device, _host_blocks(host))


def _device_blocks(columns: TableColumns) -> Snapshot:
    parents = columns.parents.data
    for block in columns.parents_first():
        first = parents[block] < 0
        digest, parent = columns.digests[block], columns.roots[block] if first else columns.digests[parents[block]]
        assert digest is not None
        assert parent is not None
        names = [columns.names[block]] if block in columns.names else None
        tokens, text = columns.tokens[block].tobytes(), block not in columns.media
        yield Stored(Tier.DEVICE, [digest], [parent], tokens, text, first, names)


def _host_blocks(host: HostPool) -> Snapshot:
    entries, tokens, names = host.columns()
    return (host_block(digest, parent, tokens[block], names.get(block)) for block, digest, parent in entries)


def host_block(digest: bytes, parent: bytes, tokens: NDArray[np.uint32], names: Names | None) -> Stored:
    """A block of the host pool with these tokens, [block_size]; `names` as in `PrefixTable.names`."""
    return Stored(
        Tier.HOST,
        [digest],
        [parent],
        tokens.tobytes(),
        first=isinstance(parent, Root),
        names=[names] if names is not None else None,
    )
