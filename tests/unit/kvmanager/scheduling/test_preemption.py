"""The victim is the last of the running order, whole requests at a time, and no request is starved."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, all_running, expect, finished, output, right

from pagekv.kvmanager.scheduling.sequence import HOLDING, SeqStatus

WAITING, RUNNING = SeqStatus.WAITING, SeqStatus.RUNNING


def test_higher_priority_runs_first_and_is_preempted_last() -> None:
    driver = Driver(num_blocks=8, max_running=16)
    low = driver.submit([1] * 8, max_tokens=12, priority=5)
    high = driver.submit([2] * 8, max_tokens=12, priority=-5)
    driver.step()
    assert driver.scheduler.running[0] is high.sequences[0]
    driver.drain()
    assert high.sequences[0].preemptions == 0
    assert low.sequences[0].preemptions > 0
    assert output(low) == expect([1] * 8, 12)


def test_a_victim_takes_its_whole_request_along() -> None:
    driver = Driver(num_blocks=12, block_size=4, depth=1, host_blocks=32, preemption="swap")
    first = driver.submit(list(range(10)), max_tokens=20)
    driver.step()
    group = driver.submit(list(range(20, 29)), max_tokens=8, n=4)
    all_running(driver, group)
    while not group.sequences[0].preemptions:
        assert driver.step()
        states = {s.state for s in group.sequences if s.state in (*HOLDING, WAITING)}
        assert states in ({RUNNING}, {WAITING}), "some wait and others run"
    assert [s.preemptions for s in group.sequences] == [1] * 4
    assert first.sequences[0].preemptions == 0
    driver.drain()
    assert right(first)
    assert right(group)


def test_a_group_in_need_waits_whole_rather_than_in_part() -> None:
    """The last of the order finds no block: the request before it goes on, the group comes back as one."""
    driver = Driver(num_blocks=9, block_size=4, depth=1, prefix_cache=False)
    first = driver.submit(list(range(12)), max_tokens=5)
    driver.step()
    group = driver.submit(list(range(20, 27)), max_tokens=8, n=3)
    all_running(driver, group)
    while not finished(group):
        assert driver.step()
        waiting = {s.state is WAITING for s in group.sequences if s.state is not SeqStatus.FINISHED}
        assert len(waiting) <= 1 or finished(first)
    assert group.sequences[0].preemptions
    assert right(first)
    assert right(group)


def test_a_group_that_outgrows_the_pool_goes_on_one_by_one() -> None:
    """Eight sequences of six blocks, of which they share one, in a pool of 12: nobody else is there to make room."""
    driver = Driver(num_blocks=12, block_size=4, depth=2)
    group = driver.submit(list(range(6)), max_tokens=18, n=8)
    driver.drain()
    assert right(group)
    # The others make room for the first, one after the other.
    assert group.sequences[0].preemptions == 0
    assert driver.scheduler.counters.preemptions > 0


def test_a_request_preempted_often_is_passed_over_while_another_can_be_found() -> None:
    driver = Driver(num_blocks=16, block_size=4, depth=1, preemption_limit=2, prefix_cache=False)
    first, second, third = (driver.submit([i] * 10, max_tokens=40 if i == 0 else 12) for i in range(3))
    driver.step()
    third.sequences[0].preemptions = 2
    (needy,) = first.sequences
    assert driver.scheduler.preemption.preempt_behind(needy)
    assert second.sequences[0].state is WAITING
    assert third.sequences[0].state is RUNNING
    # With nobody else left it is the turn of the spared one.
    assert driver.scheduler.preemption.preempt_behind(needy)
    assert third.sequences[0].state is WAITING
    assert not driver.scheduler.preemption.preempt_behind(needy)
    driver.drain()
    assert all(right(request) for request in (first, second, third))


def test_a_request_is_spared_for_what_any_of_its_sequences_went_through() -> None:
    """Children that came in after the parent had been preempted are part of the same request."""
    driver = Driver(depth=1, preemption_limit=2, prefix_cache=False)
    first, other = (driver.submit([i] * 10, max_tokens=60) for i in range(2))
    group = driver.submit([7] * 21, max_tokens=12, n=3)
    all_running(driver, group)
    group.sequences[0].preemptions = 2
    assert [s.preemptions for s in group.sequences] == [2, 0, 0]
    assert driver.scheduler.preemption.preempt_behind(first.sequences[0])
    assert other.sequences[0].state is WAITING
    assert all(s.state is RUNNING for s in group.sequences)
    driver.drain()
    assert right(group)


def test_the_front_of_the_order_is_never_preempted_for_a_spared_request() -> None:
    """Else there would be no progress: who needs a block never stands behind its victim."""
    driver = Driver(num_blocks=16, block_size=4, depth=1, preemption_limit=0, prefix_cache=False)
    requests = [driver.submit([i] * 10, max_tokens=30) for i in range(4)]
    driver.drain()
    assert requests[0].sequences[0].preemptions == 0
    assert driver.scheduler.counters.preemptions > 0
    assert all(right(request) for request in requests)
