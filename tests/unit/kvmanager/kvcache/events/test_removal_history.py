"""The history of removals from the prefix table, in bounded memory."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.kvcache.events.removal_history import MAX_GENERATION, MIN_GENERATION, Removal, RemovalHistory


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def removal(step: int) -> Removal:
    return Removal(False, step, step / 10)


def test_the_latest_removal_counts() -> None:
    history = RemovalHistory()
    history.add([digest(1), digest(2)], removal(5))
    history.add([digest(1)], removal(6))
    assert [history.find(digest(number)) for number in (1, 2, 3)] == [removal(6), removal(5), None]


def test_it_remembers_the_newest_and_stays_bounded() -> None:
    history = RemovalHistory(generation=100)
    for step in range(1000):
        history.add([digest(step)], removal(step))
        assert len(history) <= 200
        for ago in range(min(step + 1, 100)):
            assert history.find(digest(step - ago)) == removal(step - ago)
    assert history.find(digest(700)) is None


def test_of_more_digests_at_once_than_it_holds_it_takes_the_first() -> None:
    history = RemovalHistory(generation=100)
    history.add(map(digest, range(1000)), removal(1))
    assert len(history) == 100
    assert history.find(digest(99)) is not None
    assert history.find(digest(100)) is None


@pytest.mark.parametrize(
    ("num_blocks", "generation"), [(16, MIN_GENERATION), (5000, 5000), (10 * MAX_GENERATION, MAX_GENERATION)]
)
def test_it_remembers_as_many_as_the_pool_has_blocks_within_bounds(num_blocks: int, generation: int) -> None:
    history = RemovalHistory()
    history.size_for(num_blocks)
    most = 0
    for number in range(3 * generation):
        history.add([digest(number)], removal(number))
        most = max(most, len(history))
    # One of two generations is dropped as soon as the other is full.
    assert generation <= len(history) <= most < 2 * generation
    assert history.find(digest(2 * generation)) is not None
    assert history.find(digest(generation - 1)) is None
