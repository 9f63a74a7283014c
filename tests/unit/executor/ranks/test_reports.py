"""Each step of each rank is compared with rank 0's, in whatever order they come."""

from __future__ import annotations

import threading

import pytest

from pagekv.executor.ranks.reports import RankReport, RankReports, RanksLate
from pagekv.executor.session.epoch import RanksDiffer

RIGHT, WRONG = b"rightful", b"mistaken"


def reports(*ranks: int, timeout_s: float = 60.0) -> RankReports:
    made = RankReports(ranks, timeout_s)
    made.begin(5)
    return made


def test_a_report_as_bytes() -> None:
    report = RankReport(2**64 - 1, 3, RIGHT, 2**40)
    assert RankReport.from_bytes(report.to_bytes()) == report


def test_times_of_the_latest_step_that_all_ended() -> None:
    found = reports(1, 2)
    found.add(2, RankReport(5, 1, RIGHT, 30))
    assert found.settle(5, 1, RIGHT, 10) == ()
    found.add(1, RankReport(5, 1, RIGHT, 20))
    found.add(1, RankReport(5, 2, RIGHT, 21))
    assert found.settle(5, 2, RIGHT, 11) == (10, 20, 30)
    found.add(2, RankReport(5, 2, RIGHT, 31))
    assert found.settle(5, 3, RIGHT, 12) == (11, 21, 31)


def test_the_step_before_is_waited_for() -> None:
    found = reports(1)
    found.settle(5, 1, RIGHT, 10)
    late = threading.Timer(0.05, found.add, (1, RankReport(5, 1, RIGHT, 20)))
    late.start()
    assert found.settle(5, 2, RIGHT, 11) == (10, 20)
    slow = reports(1, timeout_s=0.01)
    slow.settle(5, 1, RIGHT, 0)
    with pytest.raises(RanksLate, match=r"^rank 1 did not end step 1 within 0.01 s \(--rank-timeout-s\)") as late_one:
        slow.settle(5, 2, RIGHT, 0)
    assert late_one.value.ranks == [1]
    several = reports(1, 2, 3, timeout_s=0.01)
    several.settle(5, 1, RIGHT, 0)
    several.add(2, RankReport(5, 1, RIGHT, 20))
    with pytest.raises(RanksLate, match=r"^ranks 1, 3 did not end"):
        several.settle(5, 2, RIGHT, 0)


@pytest.mark.parametrize("first", [True, False])
def test_a_difference_names_rank_and_step(first: bool) -> None:
    found = reports(1, 2)
    for rank in (1, 2):
        found.add(rank, RankReport(5, 1, RIGHT, 0))
    found.settle(5, 1, RIGHT, 0)
    if first:
        found.add(2, RankReport(5, 2, WRONG, 0))
        with pytest.raises(RanksDiffer, match="rank 2 differs from rank 0 at step 2: tables or tokens"):
            found.settle(5, 2, RIGHT, 0)
    else:
        found.settle(5, 2, RIGHT, 0)
        found.check(2)
        found.add(2, RankReport(5, 2, WRONG, 0))
    with pytest.raises(RanksDiffer, match="rank 2 differs from rank 0 at step 2"):
        found.check(2)
    found.begin(6)
    found.check(2)
    assert found.settle(6, 1, RIGHT, 0) == ()


def test_each_epoch_that_differs_counts_once() -> None:
    found = reports(1)
    for epoch, counted in ((5, 1), (6, 2)):
        found.begin(epoch)
        found.add(1, RankReport(epoch, 1, WRONG, 0))
        for _ in range(2):
            with pytest.raises(RanksDiffer):
                found.settle(epoch, 1, RIGHT, 0)
        assert found.num_differences == counted


def test_a_failure_counts_once_rank_0_did_the_step() -> None:
    found = reports(1)
    found.fail(1, 4, 1, "of another epoch")
    found.add(1, RankReport(5, 1, RIGHT, 0))
    found.fail(1, 5, 2, "it refused the step")
    # Rank 0 refuses step 2 as well, after it has collected the one before.
    found.settle(5, 1, RIGHT, 0)
    found.check(1)
    with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 at step 2: it refused the step"):
        found.settle(5, 2, RIGHT, 0)


def test_a_step_of_the_epoch_before_is_neither_compared_nor_waited_for() -> None:
    """Rank 0 may have launched the first step of an epoch when it collects the last ones of the epoch before."""
    found = reports(1)
    found.settle(5, 1, RIGHT, 10)
    later = threading.Timer(0.05, found.begin, (6,))
    later.start()
    # Rank 1 has dropped both.
    assert found.settle(5, 2, RIGHT, 10) == ()
    assert found.settle(5, 3, RIGHT, 10) == ()
    found.add(1, RankReport(6, 3, WRONG, 20))
    found.check(3)
    found = reports(1)
    found.begin(6)
    assert found.settle(5, 1, WRONG, 10) == ()
    found.add(1, RankReport(6, 1, RIGHT, 20))
    assert found.settle(6, 1, RIGHT, 10) == (10, 20)
