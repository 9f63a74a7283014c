"""Retired blocks by batch, in the order in which they were retired."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pagekv.kvmanager.kvcache.retired_blocks import Note, RetiredBlocks


def note(digests: Sequence[bytes]) -> None:
    pass


def other(digests: Sequence[bytes]) -> None:
    pass


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def test_blocks_are_taken_by_batch_and_once() -> None:
    retired = RetiredBlocks(10)
    retired.add(ids(7, 3, 5), note)
    retired.add(ids(1, 9), other)
    assert [block in retired for block in (3, 4, 9)] == [True, False, True]
    assert (retired.note(5), retired.note(1), retired.count) == (note, other, 5)
    assert retired.take(ids(9, 2, 5, 7)) == [(other, [9]), (note, [5, 7])]
    assert retired.take(ids(9, 2, 5, 7)) == []
    assert retired.count == 2
    assert np.flatnonzero(retired.marked).tolist() == [1, 3]


def test_the_oldest_come_first_and_each_once() -> None:
    retired = RetiredBlocks(10)
    retired.add(ids(7, 3, 5), note)
    retired.add(ids(1, 9), other)
    assert [retired.oldest(2).tolist() for _ in range(3)] == [[7, 3], [5, 1], [9]]


def test_what_was_taken_is_passed_over_and_costs_nothing_from_then_on() -> None:
    """One block stays retired while thousands come and are taken: it is all that is kept."""
    retired = RetiredBlocks(1001)
    retired.add(ids(1000), note)
    for _ in range(5):
        retired.add(np.arange(1000, dtype=np.int32), other)
        retired.take(np.arange(1000, dtype=np.int32))
        assert retired.oldest(256).tolist() == [1000]
        retired.take(ids(1000))
        retired.add(ids(1000), note)
        assert (retired.count, len(retired._queue), len(retired._notes)) == (1, 1, 1)


def test_a_block_that_was_retired_again_stands_in_its_latest_batch_alone() -> None:
    retired = RetiredBlocks(10)
    retired.add(ids(7, 3, 5), note)
    retired.take(ids(3))
    retired.add(ids(3, 1), other)
    assert retired.oldest(9).tolist() == [7, 5, 3, 1]


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_plain_sets(seed: int) -> None:
    chance, retired = random.Random(seed), RetiredBlocks(30)
    model: dict[int, Note] = {}
    for _ in range(200):
        some = chance.sample(range(30), chance.randrange(1, 12))
        move = chance.randrange(3)
        if move == 0:
            fresh = [block for block in some if block not in model]
            which: Note = chance.choice([note, other])
            retired.add(ids(*fresh), which)
            model |= dict.fromkeys(fresh, which)
        elif move == 1:
            taken = {block: which for which, blocks in retired.take(ids(*some)) for block in blocks}
            assert taken == {block: model.pop(block) for block in some if block in model}
        elif retired.count:
            blocks = retired.oldest(chance.randrange(1, 5))
            for which, taken_now in retired.take(blocks):
                assert all(model.pop(block) is which for block in taken_now)
        assert (retired.count, set(np.flatnonzero(retired.marked).tolist())) == (len(model), set(model))
    while retired.count:
        retired.take(retired.oldest(3))
    assert not retired.marked.any()
