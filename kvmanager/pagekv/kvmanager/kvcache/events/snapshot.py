"""The prefix tables at one moment, for a reader that takes its time."""

from __future__ import annotations

from itertools import chain

import numpy as np

from pagekv.kvmanager.kvcache.events.batch import Stored, Tier
from pagekv.kvmanager.kvcache.events.subscription import Snapshot
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable, TableColumns


def take_snapshot(table: PrefixTable, host: HostPool | None = None) -> Snapshot:
    """Every block in the tables now, the device's first, parents before children there. In the host pool a block's
    parent may come later, or not at all.

    What is costly happens when the iterator is read, a block at a time, from a copy that is made here.
    """
    device = _parents_first(table.columns())
    return device if host is None or not host.num_cached else chain(device, _host_blocks(host))


def _parents_first(columns: TableColumns) -> Snapshot:
    told = np.zeros(len(columns.published), np.bool_).data
    parents, loose, media = columns.parents.data, columns.loose_parents, columns.media
    for block in np.flatnonzero(columns.published).tolist():
        chain = []
        while block >= 0 and not told[block]:
            told[block] = True
            chain.append(block)
            block = parents[block]
        for link in reversed(chain):
            parent = loose.get(link) or columns.digests[parents[link]]
            digest = columns.digests[link]
            assert digest is not None
            assert parent is not None
            tokens, first = columns.tokens[link].tobytes(), parents[link] < 0
            yield Stored(Tier.DEVICE, [digest], [parent], tokens, link not in media, first)


def _host_blocks(host: HostPool) -> Snapshot:
    entries, tokens = host.columns()
    return (Stored(Tier.HOST, [digest], [parent], tokens[block].tobytes()) for block, digest, parent in entries)
