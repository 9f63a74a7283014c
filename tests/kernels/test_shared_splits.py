"""Runs of rows that share splits: who is with whom, and where a run is cut."""

from __future__ import annotations

import numpy as np
import pytest

from pagekv.kernels import shared_splits
from pagekv.kernels.shared_splits import SharedSplits


@pytest.fixture(autouse=True)
def every_saving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_splits, "MIN_SAVED", 1)


def found(tables: list[list[int]], end: list[int], *, first: int = 0, blocks: int = 2, most: int = 8) -> SharedSplits:
    count = len(tables)
    return shared_splits.shared_splits(
        np.array(tables, np.int32),
        np.full(count, first, np.int32),
        np.array(end, np.int32),
        blocks_per_split=np.full(count, blocks, np.int32),
        most=most,
    )


def runs(shared: SharedSplits) -> list[tuple[list[int], int]]:
    """Rows in their own order, and the split."""
    return sorted(
        (sorted(shared.order[first : first + count].tolist()), split) for first, count, split in shared.runs.tolist()
    )


TABLES = [[9, 8, 7, 6, 1, 2], [3, 8, 7, 6, 1, 2], [9, 8, 7, 6, 5, 4], [9, 8, 7, 5, 1, 2]]


def test_rows_share_splits_as_far_as_their_tables_are_equal_from_the_first_block() -> None:
    shared = found(TABLES, [3, 3, 3, 3])
    assert runs(shared) == [([0, 2], 1), ([0, 2, 3], 0)]
    assert shared.covered.tolist() == [[True, True], [False, False], [True, True], [True, False]]
    assert sorted(shared.order.tolist()) == [0, 1, 2, 3]


def test_only_splits_that_are_whole_and_visible_for_both_are_shared() -> None:
    assert runs(found(TABLES, [3, 3, 1, 0])) == [([0, 2], 0)]
    assert runs(found(TABLES, [3, 3, 3, 3], first=1)) == [([0, 2], 1)]


def test_long_runs_are_cut_evenly() -> None:
    shared = found([[1, 2, row, row] for row in range(9)], [2] * 9, most=4)
    assert sorted(len(rows) for rows, _ in runs(shared)) == [3, 3, 3]
    # A row that is left over is alone.
    assert sorted(len(rows) for rows, _ in runs(found([[1, 2]] * 3, [1] * 3, most=2))) == [2]


def test_too_little_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_splits, "MIN_SAVED", 4)
    for shared in (found(TABLES, [3, 3, 3, 3]), found(TABLES, [3, 3, 3, 3], most=1), found(TABLES[:1], [3])):
        assert shared.runs.shape == (0, 3)
        assert not shared.covered.any()
        assert shared.order.tolist() == list(range(len(shared.covered)))
