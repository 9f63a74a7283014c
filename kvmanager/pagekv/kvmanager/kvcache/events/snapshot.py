"""The prefix tables at one step boundary, block by block, for a watch that begins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_hash import Root
from pagekv.kvmanager.kvcache.events.batch import Stored, Tier
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Names, PrefixTable
from pagekv.kvmanager.kvcache.table_columns import TableColumns

# Every block in the tables, one by one: first the device's, parents before children, then the host's.
Snapshot = Iterator[Stored]


def take_snapshot(table: PrefixTable, host: HostPool | None = None) -> Snapshot:
    """The tables as they are now. On the host, a block's parent may come later, or not at all.

    Only the columns are copied here; blocks are made one by one as the iterator is read.
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
