"""Steps are shorter while a newcomer that comes and goes may ask again."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.visitors import MOST_STEPS, STEPS_BEHIND, Visitors

FLOOD, GUEST = Tenant("flood", 1), Tenant("guest", 2)


def steps_left(visitors: Visitors, present: set[int], newcomers: set[int] | None = None) -> int:
    """Steps for which there are visitors, from the next one on with always the same tenants."""
    count = 0
    while True:
        visitors.see(present, newcomers or set())
        if not visitors:
            return count
        count += 1


def test_a_newcomer_is_a_visitor_while_it_is_there_and_for_some_steps_behind_that() -> None:
    visitors = Visitors()
    visitors.see({1}, set())
    assert not visitors
    for newcomers in ({2}, set[int](), set[int]()):
        visitors.see({1, 2}, newcomers)
        assert visitors
    assert steps_left(visitors, {1}) == STEPS_BEHIND


def test_a_visitor_that_comes_again_is_one_from_the_beginning() -> None:
    visitors = Visitors()
    visitors.see({1, 2}, {2})
    visitors.see({1}, set())
    assert steps_left(visitors, {1, 2}, {2}) == MOST_STEPS


def test_a_newcomer_that_stays_is_no_visitor_in_the_end() -> None:
    visitors = Visitors()
    assert steps_left(visitors, {1, 2}, {2}) == MOST_STEPS
    assert steps_left(visitors, {1}) == 0


def test_tenants_that_are_no_newcomers_when_they_come_are_no_visitors() -> None:
    visitors = Visitors()
    visitors.see({1, 2}, set())
    visitors.see({1, 2}, {2})
    assert not visitors
    assert steps_left(visitors, {1}) == 0


def test_each_visitor_is_one_for_itself() -> None:
    visitors = Visitors()
    visitors.see({1, 2, 3}, {2, 3})
    visitors.see({1, 3}, {3})
    assert steps_left(visitors, {1}) == STEPS_BEHIND


def test_steps_are_shorter_while_there_are_visitors() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    flood = [driver.submit([index, 1], max_tokens=60, tenant=FLOOD) for index in range(24)]
    driver.step()
    driver.scheduler.set_bound(StepBound(16, 1.0, 6))
    driver.submit([5] * 4, max_tokens=3, tenant=GUEST)
    first = len(driver.plans)
    for _ in range(STEPS_BEHIND + 8):
        driver.step()
        driver.check()
    decodes = [plan.num_decodes for plan in driver.plans[first:]]
    # The prompt of the guest, beside which one decodes; then its two tokens more, and as long as it may come again.
    assert decodes[0] == 1
    assert decodes[1 : 3 + STEPS_BEHIND] == [6] * (2 + STEPS_BEHIND)
    assert decodes[3 + STEPS_BEHIND :] == [16] * 5
    driver.drain()
    assert all(map(finished, flood))


def test_a_prompt_of_a_newcomer_is_not_computed_in_shorter_steps() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    for index in range(16):
        driver.submit([index, 1], max_tokens=60, tenant=FLOOD)
    driver.step()
    driver.scheduler.set_bound(StepBound(32, 1.0, 4))
    driver.submit([5] * 60, max_tokens=2, tenant=GUEST)
    first = len(driver.plans)
    driver.step()
    driver.step()
    assert [plan.num_tokens - plan.num_decodes for plan in driver.plans[first:]] == [30, 30]


def test_equal_tenants_of_one_caller_each_are_no_visitors() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    tenants = [Tenant(str(number), number) for number in range(1, 9)]
    driver.submit([1], max_tokens=1, tenant=tenants[0])
    driver.drain()
    driver.scheduler.set_bound(StepBound(64, 1.0, 1))
    for turn in range(4):
        for tenant in tenants:
            driver.submit([turn, tenant.number], max_tokens=3, tenant=tenant)
        while driver.scheduler.running or driver.scheduler.num_waiting:
            driver.step()
            assert not driver.scheduler._visitors
