"""Twins alone; `test_prefix_table.py` shows what they are for."""

from __future__ import annotations

from pagekv.kvmanager.kvcache.twins import Twins

ONE, OTHER = b"1" * 32, b"2" * 32


def twins_of(*pairs: tuple[int, bytes]) -> Twins:
    twins = Twins()
    for block, digest in pairs:
        twins.add(block, digest)
    return twins


def test_the_one_that_came_first_takes_over_first() -> None:
    twins = twins_of((5, ONE), (3, ONE), (4, OTHER), (5, ONE))
    assert [twins.pop_oldest(digest) for digest in (ONE, ONE, ONE, OTHER, OTHER)] == [5, 3, None, 4, None]
    assert not twins


def test_one_that_is_removed_takes_nothing_over() -> None:
    twins = twins_of((5, ONE), (3, ONE))
    twins.remove(5)
    twins.remove(9)
    assert (5 in twins, 3 in twins, twins.digest(5), twins.digest(3)) == (False, True, None, ONE)
    assert (twins.pop_oldest(ONE), twins.pop_oldest(ONE), len(twins)) == (3, None, 0)


def test_all_twins_of_a_digest_go_with_it() -> None:
    twins = twins_of((5, ONE), (4, OTHER), (3, ONE))
    twins.pop_all(ONE)
    twins.pop_all(ONE)
    assert [block in twins for block in (3, 4, 5)] == [False, True, False]
    assert twins.pop_oldest(ONE) is None
    twins.clear()
    assert not twins
    assert twins.pop_oldest(OTHER) is None
