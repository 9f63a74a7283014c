"""The history of removals from the prefix table, in bounded memory."""

from __future__ import annotations

from pagekv.kvmanager.kvcache.events.log import Removal, RemovalHistory


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
