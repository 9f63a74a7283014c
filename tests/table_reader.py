"""A reader of the prefix tables' changes that applies them as a client would, and the tables to compare with."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.block_pool import BlockPool
from pagekv.kvmanager.host_pool import HostPool
from pagekv.kvmanager.table_diff import Key, Tier
from pagekv.kvmanager.table_watch import Diff, StoredBlock, TableWatch

# Digest to parent digest and token ids.
Table = dict[bytes, tuple[bytes, list[int]]]


def table_of(pool: BlockPool) -> Table:
    """The device's table, from scratch."""
    found: Table = {}
    for block in np.flatnonzero(pool.table.published).tolist():
        digest, parent = pool.table.digest(block), pool.table.parent(block)
        assert digest is not None
        assert parent is not None
        found[digest] = parent, pool.table.token_ids(block)
    return found


def host_table_of(host: HostPool) -> Table:
    """The host pool's."""
    found = {key: block for block, key in enumerate(host._key) if key is not None}
    return {digest: (host._parent[block], host.token_ids(block)) for digest, block in found.items()}


class Reader:
    """Applies what a watch tells, as a client would."""

    def __init__(self, watch: TableWatch) -> None:
        self.watch = watch
        self.table: Table = {}
        self.host_table: Table = {}
        while blocks := watch.take_snapshot(3):
            for key, stored in blocks:
                self.store(key, stored)

    def of(self, tier: Tier) -> Table:
        return self.table if tier is Tier.DEVICE else self.host_table

    def store(self, key: Key, stored: StoredBlock) -> None:
        tier, digest = key
        assert digest not in self.of(tier)
        self.of(tier)[digest] = stored.parent, list(stored.token_ids)

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
            self.host_table.clear()
        for key, stored in diff.changes.items():
            if stored is None:
                tier, digest = key
                del self.of(tier)[digest]
            else:
                self.store(key, stored)
        return True
