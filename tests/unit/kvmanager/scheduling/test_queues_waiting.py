"""The waiting queue: its order, what leaves it from the middle, and sequences that wait for a fork."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.scheduling.queues import WaitingQueue
from pagekv.kvmanager.scheduling.sequence import SeqStatus


def test_sequences_come_out_by_priority_and_then_by_arrival() -> None:
    driver, queue = Driver(), WaitingQueue()
    late, urgent, early = (driver.submit([1], priority=priority).sequences[0] for priority in (1, 0, 1))
    for sequence in (early, late, urgent):
        queue.push(sequence)
    assert len(queue) == 3
    out = []
    while (head := queue.head()) is not None:
        queue.take(head)
        out.append(head)
    assert out == [urgent, late, early]
    assert len(queue) == 0


def test_a_sequence_that_ends_is_passed_over() -> None:
    driver, queue = Driver(), WaitingQueue()
    first, second = (driver.submit([1]).sequences[0] for _ in range(2))
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    assert first.state is SeqStatus.FINISHED
    assert (len(queue), queue.head()) == (1, second)


def test_children_wait_for_a_fork_until_they_are_taken() -> None:
    request = Driver().submit([1, 2], n=4)
    queue = WaitingQueue()
    queue.add(request)
    assert (len(queue), queue.num_forking) == (1, 3)
    assert (queue.count(0), queue.count(1)) == (4, 0)
    queue.remove(request.sequences[2])
    assert (request.sequences[2].state, queue.num_forking) == (SeqStatus.FINISHED, 2)
    queue.expect_fork(request)
    assert queue.forking == [request]
    assert queue.take_children(request) == [request.sequences[1], request.sequences[3]]
    assert (queue.forking, queue.num_forking) == ([], 0)


def test_a_waiting_request_is_passed_by_a_bounded_number() -> None:
    """No starvation: with an aging of 3 fewer than three later requests of the next better priority go first."""
    driver = Driver(max_running=1, priority_aging=3)
    driver.submit([1], max_tokens=4)
    driver.step()
    low = driver.submit([2], priority=1, max_tokens=1)
    passed = 0
    while low.sequences[0].state is not SeqStatus.FINISHED:
        driver.submit([3], max_tokens=1)
        driver.step()
        passed = sum(finished(request) for request in driver.requests[2:])
    assert passed == 2


def test_strict_priorities_can_be_asked_for() -> None:
    driver = Driver(max_running=1, priority_aging=0)
    low = driver.submit([2], priority=1, max_tokens=1)
    for _ in range(20):
        driver.submit([3], max_tokens=1)
        driver.step()
    assert not finished(low)
    driver.drain()
    assert finished(low)
