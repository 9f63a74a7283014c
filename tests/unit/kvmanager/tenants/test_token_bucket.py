"""Token buckets, under a clock that the test turns."""

from __future__ import annotations

import pytest
from support.clock import Clock

from pagekv.kvmanager.tenants.token_bucket import TokenBucket


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bucket(clock: Clock, per_s: float | None = 10.0, burst_s: float = 60.0) -> TokenBucket:
    made = TokenBucket(burst_s, clock)
    made.set_rate(per_s)
    return made


def test_everything_is_let_through_without_a_rate(clock: Clock) -> None:
    free = TokenBucket(60.0, clock)
    for _ in range(3):
        free.take(1e12)
        assert free.wait_s() == 0


def test_a_bucket_begins_full_and_says_how_long_until_it_is_above_zero(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.take(599)
    assert tokens.wait_s() == 0
    # The last one may take more than there is.
    tokens.take(101)
    assert tokens.wait_s() == pytest.approx(10)
    clock.now += 4
    assert tokens.wait_s() == pytest.approx(6)
    clock.now += 6.1
    assert tokens.wait_s() == 0


def test_an_empty_bucket_waits_for_a_moment_at_least(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.take(600)
    assert tokens.wait_s() == 1e-3
    clock.now += 1e-3
    assert tokens.wait_s() == 0


def test_no_more_is_saved_than_comes_in_the_burst(clock: Clock) -> None:
    tokens = bucket(clock, burst_s=2.0)
    clock.now += 3600
    tokens.take(20)
    assert tokens.wait_s() > 0


def test_a_debt_outlives_another_rate(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.take(700)
    tokens.set_rate(20)
    assert tokens.wait_s() == pytest.approx(5)
    tokens.set_rate(1)
    assert tokens.wait_s() == pytest.approx(100)
    clock.now += 50
    tokens.set_rate(50)
    assert tokens.wait_s() == pytest.approx(1)


def test_what_was_saved_is_cut_to_a_lower_rate(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.set_rate(1)
    tokens.take(60)
    assert tokens.wait_s() > 0


def test_a_higher_rate_gives_nothing_at_once(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.take(600)
    tokens.set_rate(1000)
    assert tokens.wait_s() > 0
    clock.now += 1
    tokens.take(999)
    assert tokens.wait_s() == 0


def test_no_limit_in_between_ends_a_debt(clock: Clock) -> None:
    tokens = bucket(clock)
    tokens.take(10_000)
    tokens.set_rate(None)
    assert tokens.wait_s() == 0
    tokens.set_rate(10)
    tokens.take(599)
    assert tokens.wait_s() == 0


def test_time_without_a_rate_fills_nothing(clock: Clock) -> None:
    tokens = bucket(clock, None)
    clock.now += 1e6
    tokens.set_rate(10)
    tokens.take(600)
    assert tokens.wait_s() > 0


def test_the_clock_is_the_systems() -> None:
    tokens = TokenBucket(1.0)
    tokens.set_rate(1e6)
    assert tokens.wait_s() == 0
    tokens.take(1e9)
    assert 900 < tokens.wait_s() <= 999
