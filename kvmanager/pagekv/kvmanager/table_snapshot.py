"""The prefix table at one moment, for a reader that takes its time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from pagekv.kvmanager.prefix_table import PrefixTable, TableColumns
from pagekv.kvmanager.table_watch import StoredBlock


def take_snapshot(table: PrefixTable) -> Iterator[tuple[bytes, StoredBlock]]:
    """Digest and content of every block in the table now, parents before children.

    What is costly happens when the iterator is read, a block at a time, from a copy that is made here.
    """
    return _parents_first(table.columns())


def _parents_first(columns: TableColumns) -> Iterator[tuple[bytes, StoredBlock]]:
    told = np.zeros(len(columns.published), np.bool_).data
    parents, loose = columns.parents.data, columns.loose_parents
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
            yield digest, StoredBlock(parent, array("I", columns.tokens[link].tobytes()))
