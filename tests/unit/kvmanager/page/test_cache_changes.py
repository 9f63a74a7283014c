"""Blocks that entered and left the prefix table between two looks."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.engine.views import BlockMap
from pagekv.kvmanager.page.cache_changes import CacheChanges

NOBODY = np.zeros(4, np.int32)


def at(published: list[bool], evictions: int, epoch: int = 1) -> BlockMap:
    return BlockMap(epoch, 0, NOBODY, NOBODY, np.array(published), evictions, NOBODY, NOBODY)


def test_stored_evicted_and_cleared_blocks_are_counted() -> None:
    changes = CacheChanges()
    assert changes.look(at([True, False, False, False], 0)) == []
    assert changes.look(at([True, False, True, True], 0)) == [("stored", {"blocks": 2, "block": 2})]
    # Block 0 was evicted and filled again, block 2 was evicted.
    assert changes.look(at([True, False, False, True], 2)) == [
        ("evicted", {"blocks": 2}),
        ("stored", {"blocks": 1, "block": None}),
    ]
    assert changes.look(at([False, True, False, False], 2)) == [
        ("cleared", {"blocks": 2}),
        ("stored", {"blocks": 1, "block": 1}),
    ]
    assert changes.look(at([False, True, False, False], 2)) == []


def test_looks_at_different_pools_and_around_a_pause_are_not_compared() -> None:
    changes = CacheChanges()
    changes.look(at([True] * 4, 0))
    assert changes.look(at([False] * 4, 0, epoch=2)) == []
    changes.pause()
    assert changes.look(at([True] * 4, 0, epoch=2)) == []
