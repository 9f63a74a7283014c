"""A reader of the prefix tables' changes that applies them as a client would, and the tables to compare with."""

from __future__ import annotations

import numpy as np
from support.clock import Clock
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.batch import Stored, Tier
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.pins import Pins

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
    return {digest: (host._parent[block], host._tokens[block].tolist()) for digest, block in found.items()}


class WatchedDriver(Driver):
    """The real scheduler, with a watch of both tables, which goes on where the executor is lost."""

    def _new_pool(self, num_blocks: int) -> None:
        if not hasattr(self, "log"):
            self.log = TableLog(Clock())
            self.watch = self.log.watch()
        super()._new_pool(num_blocks)
        self.pool = BlockPool(num_blocks, self.block_size, log=self.log)
        self.pins = Pins(self.pool, max_share=1.0)
        self.host = HostPool(self.host_blocks, self.block_size, self.log)
        self.log.attach(self.pool.table, self.host)

    def check(self) -> None:
        super().check()
        self.log.step_boundary(len(self.plans))


class Reader:
    """Applies what a watch tells, as a client would."""

    def __init__(self, watch: TableWatch) -> None:
        self.watch = watch
        self.table: Table = {}
        self.host_table: Table = {}
        # Digests of the device that followed a chain root.
        self.first: set[bytes] = set()
        # Namespace and adapter of what was stored last under each digest.
        self.names: dict[tuple[Tier, bytes], tuple[str, str] | None] = {}
        while blocks := watch.take_snapshot(3):
            self.store(blocks)

    def of(self, tier: Tier) -> Table:
        return self.table if tier is Tier.DEVICE else self.host_table

    def store(self, found: list[Stored]) -> None:
        for stored in found:
            table = self.of(stored.tier)
            for place, (digest, parent, token_ids) in enumerate(stored.each()):
                assert digest not in table
                if stored.tier is Tier.DEVICE:
                    assert (stored.first and place == 0) == (parent not in table)
                    (self.first.add if stored.first and place == 0 else self.first.discard)(digest)
                table[digest] = parent, list(token_ids)
                self.names[stored.tier, digest] = stored.names[place] if stored.names is not None else None

    def read(self) -> bool:
        """Takes what there is, if there is anything."""
        diff = self.watch.take_unread()
        if not diff.size:
            return False
        if diff.cleared:
            self.table.clear()
            self.host_table.clear()
        for tier, digests in diff.removed:
            for digest in digests:
                del self.of(tier)[digest]
        self.store(diff.stored)
        assert all(digest in self.first or parent in self.table for digest, (parent, _) in self.table.items())
        return True
