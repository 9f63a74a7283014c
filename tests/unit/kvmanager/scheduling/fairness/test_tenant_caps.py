"""A tenant at its cap waits, and holds nobody else back."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap, held_back
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus

A, B = Tenant("a", 1), Tenant("b", 2)


def running(driver: Driver) -> list[LiveRequest]:
    return [request for request in driver.requests if request.sequences[0].state is SeqStatus.RUNNING]


def test_requests_above_the_cap_wait_and_others_pass() -> None:
    driver = Driver()
    driver.scheduler.set_tenants({}, {}, {1: Cap(requests=2)})
    ours = [driver.submit([1, index], max_tokens=6, tenant=A) for index in range(4)]
    theirs = [driver.submit([2, index], max_tokens=6, tenant=B) for index in range(2)]
    driver.plan()
    assert running(driver) == [*ours[:2], *theirs]
    most = 0
    while driver.step():
        most = max(most, sum(request in ours for request in running(driver)))
    assert most == 2
    assert all(map(finished, [*ours, *theirs]))


def test_blocks_that_requests_may_come_to_need_are_counted() -> None:
    """Five blocks for each: of a tenant that may have twelve two run at once."""
    driver = Driver(num_blocks=64, block_size=4)
    driver.scheduler.set_tenants({}, {}, {1: Cap(blocks=12)})
    requests = [driver.submit([1, index], max_tokens=19, tenant=A) for index in range(3)]
    driver.plan()
    assert running(driver) == requests[:2]
    driver.drain()
    assert all(map(finished, requests))


def test_a_request_that_is_alone_or_under_way_is_never_held_back() -> None:
    driver = Driver(num_blocks=64, block_size=4)
    large = driver.submit([1], max_tokens=80, n=2, tenant=A)
    caps = {1: Cap(requests=1, blocks=1)}
    assert held_back(caps, {1: large}, [], 4) == frozenset()
    assert held_back(caps, {1: large}, [large.sequences[0]], 4) == frozenset()
    other = driver.submit([2], max_tokens=2, tenant=A)
    assert held_back(caps, {1: other}, [large.sequences[0]], 4) == {1}
    assert held_back({1: Cap(blocks=41)}, {1: other}, [large.sequences[0]], 4) == frozenset()
    assert held_back({1: Cap(blocks=40)}, {1: other}, [large.sequences[0]], 4) == {1}
    assert held_back({}, {1: other}, [large.sequences[0]], 4) == frozenset()


def test_a_tenant_that_was_held_back_has_no_credit() -> None:
    driver = Driver(max_running=8, max_batch_tokens=8)
    served = driver.scheduler.waiting.served
    driver.scheduler.set_tenants({}, {}, {1: Cap(requests=1)})
    for index in range(3):
        driver.submit([1, index], max_tokens=10, tenant=A)
    others = [driver.submit([2, index, 3, 4, 5, 6], max_tokens=8, tenant=B) for index in range(12)]
    for _ in range(4):
        driver.step()
    before = served.of(1)
    assert served.of(2) > before
    assert not all(map(finished, others))
    driver.scheduler.set_tenants({}, {}, {})
    driver.plan()
    assert served.of(1) >= min(served.of(2), before + 1)
    driver.drain()
