"""A tenant at its cap waits, and holds nobody else back."""

from __future__ import annotations

from support.call_count import count_calls
from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap, RunningRequests
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
    cap = Cap(requests=1, blocks=1)
    requests = RunningRequests(4)
    assert not requests.are_above(cap, large)
    requests.add(large.sequences[0])
    assert not requests.are_above(cap, large)
    other = driver.submit([2], max_tokens=2, tenant=A)
    assert requests.are_above(cap, other)
    assert not requests.are_above(Cap(blocks=41), other)
    assert requests.are_above(Cap(blocks=40), other)
    assert not requests.are_above(Cap(), other)


def test_a_request_counts_while_it_has_sequences_in_the_order() -> None:
    driver = Driver(num_blocks=64, block_size=4)
    requests = RunningRequests(4)
    two, one = driver.submit([1], max_tokens=80, n=2, tenant=A), driver.submit([2], max_tokens=2, tenant=A)
    for sequence in (*two.sequences, *one.sequences):
        requests.add(sequence)
    counts = [requests.count(1)]
    for sequence in (one.sequences[0], *two.sequences):
        requests.remove(sequence)
        counts.append(requests.count(1))
    assert counts == [2, 1, 1, 0]
    assert not requests.are_above(Cap(requests=1, blocks=1), one)


def test_an_admission_takes_as_long_however_many_requests_run() -> None:
    """Of tenants with caps: what is looked at for one more is not all that run."""

    def calls(admissions: int) -> int:
        driver = Driver(num_blocks=4 * admissions, max_batch_tokens=4 * admissions, max_running=admissions)
        driver.scheduler.set_tenants({}, {}, {1: Cap(requests=admissions), 2: Cap(blocks=1000)})
        for index in range(admissions):
            driver.submit([1, 2, index % 97], max_tokens=2, tenant=A)
        made = count_calls(driver.plan)
        assert len(running(driver)) == admissions
        return made

    assert calls(80) < 2.2 * calls(40)


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
