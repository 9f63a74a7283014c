"""A copy of a prefix table at one moment: unchanged by what the table does next, and read parents first."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.engine.arrays import ids

from pagekv.kvmanager.kvcache import table_columns
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable

ROOT = root_digest("model", "", "")
SIZE = 2


def published(*chains: tuple[list[int], list[int]]) -> PrefixTable:
    """A table of 12 held blocks with these chains, of blocks and of their tokens."""
    table = PrefixTable(12, SIZE, np.ones(12, np.int32))
    for blocks, tokens in chains:
        rows = np.array(tokens, np.uint32).reshape(-1, SIZE)
        digests = chain_digests(ROOT, token_bytes(tokens), SIZE)
        table.add_chain(ids(blocks), digests, ROOT, rows, first=True, media=False)
    return table


def test_columns_are_a_copy() -> None:
    table = published(([3, 1], [1, 2, 3, 4]))
    columns = table.columns()
    assert table.clear() == 2
    assert len(table) == 0
    assert columns.published.nonzero()[0].tolist() == [1, 3]
    assert (columns.parents[1], columns.parents[3], columns.roots) == (3, -1, {3: ROOT})
    assert columns.tokens[[3, 1]].tolist() == [[1, 2], [3, 4]]
    assert [columns.digests[block] for block in (3, 1)] == chain_digests(ROOT, token_bytes([1, 2, 3, 4]), SIZE)


def test_a_block_comes_after_the_one_before_it_in_its_chain() -> None:
    table = published(([9, 4, 0], [1, 2, 3, 4, 5, 6]), ([2, 7], [8, 8, 9, 9]), ([10, 5, 11], [1, 2, 3, 4, 7, 7]))
    # Of the third chain only the last block is new: it follows block 4.
    assert list(table.columns().parents_first()) == [9, 4, 0, 2, 7, 11]


@pytest.mark.parametrize("piece", [1, 4, 5])
def test_pieces_of_the_table_are_one_sequence(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(table_columns, "PIECE", piece)
    table = published(([9, 4, 0], [1, 2, 3, 4, 5, 6]), ([2, 7], [8, 8, 9, 9]), ([3, 11], [7, 7, 7, 8]))
    assert list(table.columns().parents_first()) == [9, 4, 0, 2, 3, 7, 11]


def test_no_list_of_all_blocks_is_made_before_the_first_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the garbage collector, which would look through all digests whenever a reader has made some hundred objects,
    knows nothing of them from its first collection on.
    """
    monkeypatch.setattr(table_columns, "PIECE", 4)
    table = published(([9, 4, 0], [1, 2, 3, 4, 5, 6]), ([2, 7], [8, 8, 9, 9]))
    columns = table.columns()
    found = columns.parents_first()
    assert next(found) == 9
    columns.published[4:] = False
    assert list(found) == [4, 0, 2]
    gc.collect(0)
    assert not gc.is_tracked(columns.digests)


def test_an_empty_table_has_no_blocks() -> None:
    assert list(published().columns().parents_first()) == []
