"""Sequences that share blocks and return together wait for one of them; another takes over when that one leaves."""

from __future__ import annotations

from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import Seq, live_request
from pagekv.kvmanager.scheduling.shared_prefill import SharedPrefill


def sequences(*computed: int) -> list[Seq]:
    """Sequences of one request, each with so many positions that it counts as computed."""
    command = GenerateCommand("r", [1] * 100, SamplingParams(max_tokens=9), len(computed))
    request = live_request(command, RequestStream("r", len(computed)), 0, b"root", 0)
    for sequence, count in zip(request.sequences, computed, strict=True):
        sequence.num_computed, sequence.num_published = count, count // 4
    return request.sequences


def test_a_follower_is_ready_when_all_it_shares_is_computed() -> None:
    leader, follower = sequences(0, 40)
    followers = SharedPrefill(4)
    followers.wait_for(leader, follower, 40)
    for computed, ready in ((0, False), (36, False), (40, True)):
        leader.num_computed = computed
        assert followers.is_ready(follower) is ready
    # Once ready it stays so, whatever becomes of the leader.
    leader.num_computed = 0
    assert followers.is_ready(follower)


def test_nobody_follows_one_that_has_computed_it_all() -> None:
    leader, follower = sequences(40, 40)
    followers = SharedPrefill(4)
    followers.wait_for(leader, follower, 40)
    followers.hand_over(leader)
    assert followers.is_ready(follower)
    assert follower.num_computed == 40


def test_a_follower_of_a_follower_waits_for_both() -> None:
    """Positions that the sequence between counts as computed are not computed yet."""
    first, second, third = sequences(8, 40, 24)
    followers = SharedPrefill(4)
    followers.wait_for(first, second, 40)
    followers.wait_for(second, third, 24)
    assert not followers.is_ready(third)
    first.num_computed = 24
    assert followers.is_ready(third)
    assert not followers.is_ready(second)


def test_the_follower_that_shares_most_takes_over() -> None:
    leader, short, long = sequences(12, 20, 40)
    followers = SharedPrefill(4)
    followers.wait_for(leader, short, 20)
    followers.wait_for(leader, long, 40)
    followers.hand_over(leader)
    assert followers.is_ready(long)
    assert (long.num_computed, long.num_published) == (12, 3)
    assert not followers.is_ready(short)
    long.num_computed = 20
    assert followers.is_ready(short)
    assert short.num_computed == 20


def test_one_between_two_leaves() -> None:
    """The one that leaves counts only what is truly computed, and its follower waits for the one before."""
    first, second, third = sequences(8, 40, 40)
    followers = SharedPrefill(4)
    followers.wait_for(first, second, 24)
    followers.wait_for(second, third, 40)
    followers.hand_over(second)
    assert (second.num_computed, second.num_published) == (8, 2)
    # Only 24 of the positions shared with the one that left are shared with the first, too.
    assert third.num_computed == 24
    assert not followers.is_ready(third)
    first.num_computed = 24
    assert followers.is_ready(third)
