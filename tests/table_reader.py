"""A reader of the prefix table's changes that applies them as a client would, and the table itself to compare with."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.block_pool import BlockPool
from pagekv.kvmanager.table_watch import Diff, StoredBlock, TableWatch

# Digest to parent digest and token ids.
Table = dict[bytes, tuple[bytes, list[int]]]


def table_of(pool: BlockPool) -> Table:
    """The table, from scratch."""
    found: Table = {}
    for block in np.flatnonzero(pool.table.published).tolist():
        digest, parent = pool.table.digest(block), pool.table.parent(block)
        assert digest is not None
        assert parent is not None
        found[digest] = parent, pool.table.token_ids(block)
    return found


class Reader:
    """Applies what a watch tells, as a client would."""

    def __init__(self, watch: TableWatch) -> None:
        self.watch = watch
        self.table: Table = {}
        while blocks := watch.take_snapshot(3):
            for digest, stored in blocks:
                self.store(digest, stored)

    def store(self, digest: bytes, stored: StoredBlock) -> None:
        assert digest not in self.table
        self.table[digest] = stored.parent, list(stored.token_ids)

    def read(self) -> bool:
        """Takes what there is, if there is anything."""
        if not self.watch._unread:
            return False
        # With something unread `take` never waits, so the coroutine ends at once, in or out of an event loop.
        try:
            self.watch.take().send(None)
        except StopIteration as taken:
            diff: Diff = taken.value
        if diff.cleared:
            self.table.clear()
        for digest, stored in diff.changes.items():
            if stored is None:
                del self.table[digest]
            else:
                self.store(digest, stored)
        return True
