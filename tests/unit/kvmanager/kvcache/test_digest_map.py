"""Digests of blocks, and of those that were retired and are not cleared yet."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.kvcache import digest_map
from pagekv.kvmanager.kvcache.digest_map import SWEPT, DigestMap

NUM = 4 * SWEPT


def digest(block: int) -> bytes:
    return block.to_bytes(32, "big")


def filled() -> tuple[DigestMap, list[bytes]]:
    """Every block has its digest; those from the second on are retired; and what the note was told."""
    found, told = DigestMap(NUM), list[bytes]()
    for block in range(NUM):
        found.block_of[digest(block)] = block
        found.column[block] = digest(block)
    found.retired.add(np.arange(1, NUM, dtype=np.int32), told.extend)
    return found, told


def test_retired_blocks_are_not_found_and_cost_nothing_each() -> None:
    found, told = filled()
    assert (len(found), found.lookup(digest(0)), found.lookup(digest(1))) == (1, 0, None)
    assert list(found.newest()) == [digest(0)]
    assert found.leading([0]) == [0]
    assert found.leading([0, 5, 0]) == [0]
    assert (found.note(digest(0)), found.note(b"no")) == (None, None)
    assert found.note(digest(1)) == told.extend
    assert (told, len(found.block_of)) == ([], NUM)


def test_a_step_clears_some_until_none_is_left() -> None:
    found, told = filled()
    for step in range(1, 4):
        found.sweep()
        assert told == [digest(block) for block in range(1, step * SWEPT + 1)]
        assert len(found.block_of) == NUM - step * SWEPT
    found.sweep()
    found.sweep()
    assert len(told) == NUM - 1
    assert found.block_of == {digest(0): 0}
    assert found.column == [digest(0), *[None] * (NUM - 1)]


def test_what_enters_finds_neither_its_block_nor_its_digest_taken() -> None:
    found, told = filled()
    found.make_way([3, 4], [digest(4), digest(5), digest(0), b"new"])
    assert told == [digest(3), digest(4), digest(5)]
    assert all(found.column[block] is None and digest(block) not in found.block_of for block in (3, 4, 5))
    assert found.lookup(digest(0)) == 0
    # A step goes on with others.
    found.sweep()
    assert len(told) == 3 + SWEPT


def test_all_can_be_cleared_at_once() -> None:
    found, told = filled()
    found.settle()
    assert len(told) == NUM - 1
    assert len(found) == len(found.block_of) == 1
    assert digest_map.SWEPT < NUM
