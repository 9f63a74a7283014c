"""Counters of what tenants were served, and the fairness that the scheduler has from them."""

from __future__ import annotations

import random

import pytest
from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.virtual_tokens import INPUT_COST, OUTPUT_COST, VirtualTokens
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus

A, B, C = (Tenant(name, number) for number, name in enumerate("abc", 1))


def test_one_tenant_is_not_counted() -> None:
    served = VirtualTokens()
    served.joined(0)
    served.charge_prompt(0, 100)
    served.charge_output(0, 100)
    assert (served.several, served.of(0)) == (False, 0)


def test_tokens_count_by_their_cost_and_the_weight() -> None:
    served = VirtualTokens()
    served.know(1, weight=2.0)
    served.know(2)
    for tenant in (1, 2):
        served.charge_prompt(tenant, 10)
        served.charge_output(tenant, 3)
    cost = 10 * INPUT_COST + 3 * OUTPUT_COST
    assert (served.of(1), served.of(2)) == (cost / 2, cost)


def test_an_idle_time_is_no_credit_and_a_burst_is_no_loss_for_good() -> None:
    served = VirtualTokens()
    served.joined(1)
    served.charge_prompt(1, 50)
    served.joined(2)
    assert served.of(2) == 50
    served.charge_prompt(2, 30)
    # The last one that had nothing left tells where a lonely newcomer begins.
    served.left(1)
    served.left(2)
    served.joined(3)
    assert served.of(3) == 80
    # Coming back lowers nothing.
    served.charge_prompt(1, 100)
    served.joined(1)
    assert served.of(1) == 150


def test_tenants_whose_weight_nobody_named_have_one() -> None:
    served = VirtualTokens()
    served.joined(40)
    served.charge_prompt(40, 5)
    assert (served.weight(40), served.of(40), served.of(41), served.weight(1000)) == (1, 5, 0, 1)


def test_who_was_served_least_is_next_however_many_another_has_queued() -> None:
    driver = Driver(max_running=1, max_batch_tokens=8)
    flood = [driver.submit([9, index, 1, 1], max_tokens=2, tenant=A) for index in range(8)]
    driver.step()
    quiet = [driver.submit([8, index, 2, 2], max_tokens=2, tenant=B) for index in range(3)]
    order: list[LiveRequest] = []
    while driver.step():
        order += [request for request in [*flood, *quiet] if finished(request) and request not in order]
    # In turns from the first step in which both wait.
    assert [request.command.tenant.name for request in order] == list("ababab" + "aaaaa")


def test_newcomers_have_less_than_their_share_and_go_before_their_turn() -> None:
    served = VirtualTokens()
    for number in (1, 2, 3, 4):
        served.know(number)
        served.charge_prompt(number, 10 * number)
    served.greet({1: 4, 2: 1}, {2, 3, 4}, credit=25)
    # Five sequences of four tenants: whoever has none has less than its share with one.
    assert served.newcomers == {3, 4}
    assert [served.place(number) for number in (1, 2, 3, 4)] == [10, 20, 5, 15]
    assert served.goes_before(3, 1)
    assert not served.goes_before(4, 1)
    # The longest prompt that one of them has sent is the credit of each, where that is more.
    for number, tokens in ((3, 20), (4, 60), (4, 7), (1, 1000)):
        served.sent(number, tokens)
    served.greet({1: 4, 2: 1}, {2, 3, 4}, credit=25)
    assert [served.place(number) for number in (1, 2, 3, 4)] == [10, 20, 30 - 60, 40 - 60]
    served.set_weights({1: 1.0, 4: 0.5})
    served.greet({1: 4, 2: 4}, {2, 3, 4}, credit=25)
    assert [served.place(number) for number in (3, 4)] == [30 - 60 / 0.5, 40 - 60 / 0.5]
    served.set_weights({1: 8.0, 3: 0.5})
    served.greet({1: 4, 2: 1}, {2, 3, 4}, credit=25)
    assert not served.newcomers
    assert not served.credit


def test_who_comes_is_not_behind_the_credit_of_those_that_wait() -> None:
    served = VirtualTokens()
    served.know(2)
    served.joined(1)
    served.charge_prompt(1, 100)
    served.greet({2: 8}, {1}, credit=30)
    assert served.newcomers == {1}
    served.joined(2)
    served.joined(3)
    assert [served.of(number) for number in (2, 3)] == [70, 70]
    # Now that one is a newcomer, too; those that come after it come no lower.
    served.greet({2: 8}, {1, 2, 3}, credit=30)
    assert served.newcomers == {1, 3}
    served.joined(4)
    assert (served.of(4), served.place(3)) == (70, 40)
    # The same after the last one.
    for number in (2, 3, 4, 1):
        served.left(number)
    served.joined(5)
    assert served.of(5) == 70


def test_next_are_those_that_wait_and_were_served_least() -> None:
    served = VirtualTokens()
    assert served.next() == []
    served.joined(0)
    assert served.next() == [0]
    served.left(0)
    for number in (2, 3, 5, 70):
        served.joined(number)
    # Of four that were served as much all are next, of others the least.
    assert served.next() == [2, 3, 5, 70]
    for number, tokens in ((2, 10), (3, 4), (5, 4), (70, 30)):
        served.charge_prompt(number, tokens)
    assert served.next() == [3, 5]
    served.allow([3, 5], False)
    assert served.next() == [2]
    # A newcomer has its credit; a tenant that was held back has none for that time.
    served.greet({2: 6, 3: 6, 5: 6}, {2, 3, 5, 70}, credit=25)
    assert served.newcomers == {70}
    assert served.next() == [70]
    served.welcome_nobody()
    served.joined(3)
    assert (served.of(3), served.next()) == (10, [2, 3])
    for number in (2, 3, 5, 70):
        served.left(number)
    assert served.next() == []


def prompts_waiting(driver: Driver, tenant: Tenant) -> None:
    """A flood of short prompts, with answers of one token."""
    while driver.scheduler.waiting.count(tenant.number) < 8:
        driver.submit([4] * 20, max_tokens=1, tenant=tenant)


def beside_a_flood_of_prompts(decoding: Tenant, waiting: int = 0) -> Driver:
    """A tenant decodes; another, of newcomers, has sent and given up one long prompt, and floods."""
    driver = Driver(num_blocks=2048, max_running=20, max_batch_tokens=100, depth=1, prefix_cache=False)
    driver.scheduler.set_bound(StepBound(32, 1.0, 32))
    for _ in range(8 + waiting):
        driver.submit([7] * 8, max_tokens=900, tenant=decoding)
    driver.step()
    driver.abort(driver.submit([3] * 600, max_tokens=1, tenant=A))
    return driver


@pytest.mark.parametrize("quiet", [True, False])
def test_a_long_prompt_that_was_once_sent_delays_nobody_who_comes(quiet: bool) -> None:
    """Neither a newcomer nor one that has as much running as anybody, each time when it comes."""
    driver = beside_a_flood_of_prompts(C if quiet else B)
    for _ in range(40):
        prompts_waiting(driver, A)
        driver.step()
    for _ in range(3):
        request, steps = driver.submit([5] * 30, max_tokens=1, tenant=B), 0
        while not finished(request):
            prompts_waiting(driver, A)
            driver.step()
            steps += 1
        assert steps <= 6


def test_a_newcomer_is_ahead_of_those_that_wait_by_its_longest_prompt() -> None:
    driver, leads = beside_a_flood_of_prompts(C, waiting=40), []
    served = driver.scheduler.waiting.served
    for _ in range(100):
        prompts_waiting(driver, A)
        driver.step()
        leads.append(served.of(A.number) - served.of(C.number))
    assert A.number in served.newcomers
    assert 550 < max(leads) <= 600 + 20


def test_what_a_tenant_was_served_less_is_no_credit_once_it_is_preempted() -> None:
    """One sequence of it decoded while another tenant's prompts waited; then the pool was needed, and it sends more."""
    driver = Driver(num_blocks=200, max_running=4, depth=1)
    long = driver.submit([1] * 4, max_tokens=700, tenant=A)
    driver.step()
    requests = [driver.submit([2, index] * 10, max_tokens=3, tenant=B) for index in range(80)]
    served = driver.scheduler.waiting.served
    while served.of(B.number) < served.of(A.number) + 500:
        driver.step()
    driver.scheduler.preemption.preempt(long.sequences[0])
    requests += [driver.submit([3, index] * 10, max_tokens=3, tenant=A) for index in range(80)]
    before = served.of(A.number) - served.of(B.number)
    for _ in range(20):
        driver.step()
        assert abs(served.of(A.number) - served.of(B.number) - before) < 100
    assert driver.scheduler.waiting.tenants == {A.number, B.number}


def test_a_newcomers_long_prompt_does_not_stop_halfway_for_others() -> None:
    """It is many steps' budgets long, and another tenant has prompts waiting all the time."""
    driver = Driver(num_blocks=1024, max_running=64, max_batch_tokens=100, depth=1, prefix_cache=False)
    driver.scheduler.set_bound(StepBound(32, 1.0, 32))
    flood = [driver.submit([7] * 24, max_tokens=50, tenant=A) for _ in range(50)]
    for _ in range(4):
        driver.step()
    begun = sum(request.sequences[0].cached_tokens is not None for request in flood)
    assert 8 < begun < 40
    quiet = driver.submit([5] * 300, max_tokens=2, tenant=B)
    steps = 0
    while not quiet.sequences[0].num_output:
        driver.step()
        steps += 1
    # Beside two decodes a step has 30 tokens for it; nobody else's prompt was begun.
    assert steps <= 300 / 30 + 2
    assert sum(request.sequences[0].cached_tokens is not None for request in flood) <= begun + 1
    driver.drain()
    assert all(map(finished, [*flood, quiet]))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.25, 1.0)])
@pytest.mark.parametrize("bound", [None, StepBound(6, 0.5, 6), StepBound(12, 3.0, 12)])
def test_the_difference_of_what_two_tenants_get_is_bounded(
    seed: int, weights: tuple[float, float], bound: StepBound | None
) -> None:
    """Theorem 4.4, over every interval in which both have requests waiting: outputs as long, prompts as long and as
    many at once as they like, in steps with a bound, too.
    """
    rng = random.Random(seed)
    num_blocks, block_size, longest = rng.choice([12, 24, 48]), rng.choice([2, 4]), 20
    driver = Driver(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=rng.choice([8, 24, 64]),
        max_running=rng.choice([2, 6, 16]),
        depth=rng.choice([1, 2]),
        host_blocks=rng.choice([0, 16]),
        preemption=rng.choice(["recompute", "swap"]),
    )
    served = driver.scheduler.waiting.served
    if bound is not None:
        driver.scheduler.set_bound(bound)
    tenants = dict(zip((A, B), weights, strict=True))
    for tenant, weight in tenants.items():
        served.know(tenant.number, weight)
    requests: list[LiveRequest] = []
    for _ in range(60):
        tenant = rng.choice([A, B])
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, longest if tenant is A else 3))]
        requests.append(driver.submit(prompt, max_tokens=rng.randint(1, 12 if tenant is B else 3), tenant=tenant))

    computed = [0] * len(requests)

    def got(tenant: Tenant) -> float:
        """Tokens that a tenant was served, from its sequences themselves."""
        total = 0.0
        for at, request in enumerate(requests):
            sequence = request.sequences[0]
            if request.command.tenant is tenant and sequence.cached_tokens is not None:
                computed[at] = max(computed[at], min(sequence.num_computed, len(request.command.prompt_ids)))
                total += INPUT_COST * (computed[at] - sequence.cached_tokens) + OUTPUT_COST * sequence.num_output
        return total / tenants[tenant]

    differences = [0.0]
    while {r.command.tenant for r in requests if r.sequences[0].state is SeqStatus.WAITING} == {A, B}:
        assert driver.step()
        differences.append(got(A) - got(B))
    driver.drain()
    assert all(map(finished, requests))
    assert len(differences) > 5
    most = 2 * max(INPUT_COST * longest, OUTPUT_COST * num_blocks * block_size) / min(weights)
    credit = 0 if bound is None else max(driver.scheduler.limits.max_batch_tokens, longest / min(weights))
    assert max(differences) - min(differences) <= most + 2 * credit


def test_a_prompt_under_way_waits_for_a_tenant_that_was_served_less() -> None:
    driver = Driver(num_blocks=64, max_batch_tokens=8, depth=1)
    long = driver.submit([1] * 100, max_tokens=1, tenant=A)
    driver.step()
    short = driver.submit([2] * 6, max_tokens=1, tenant=B)
    for _ in range(2):
        driver.step()
    assert finished(short)
    assert not finished(long)
    driver.drain()
    assert finished(long)


def test_a_newcomer_takes_blocks_from_the_one_that_holds_most() -> None:
    """The pool is full of long requests of one tenant: another's waits for none of them to end, and for no more than
    its share.
    """
    driver = Driver(num_blocks=16, block_size=4, max_batch_tokens=64)
    flood = [driver.submit([7, index] * 6, max_tokens=4, tenant=A) for index in range(4)]
    driver.step()
    assert driver.pool.num_free == 0
    quiet = driver.submit([5] * 17, max_tokens=2, tenant=B)
    for _ in range(3):
        driver.step()
    assert quiet.sequences[0].num_output >= 1
    assert sum(request.preemptions for request in flood) == 2
    assert not all(map(finished, flood))
    driver.drain()
    assert all(map(finished, [*flood, quiet]))


def test_a_tenant_at_its_share_takes_nothing() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_batch_tokens=64)
    ours = [driver.submit([7, index] * 6, max_tokens=12, tenant=A) for index in range(2)]
    theirs = [driver.submit([6, index] * 6, max_tokens=12, tenant=B) for index in range(2)]
    driver.step()
    more = driver.submit([5] * 17, max_tokens=2, tenant=B)
    driver.step()
    driver.step()
    assert more.sequences[0].state is SeqStatus.WAITING
    assert not any(request.preemptions for request in [*ours, *theirs])
    driver.drain()
    assert all(map(finished, [*ours, *theirs, more]))


def test_slots_are_taken_too() -> None:
    driver = Driver(num_blocks=64, max_running=2)
    flood = [driver.submit([7, index], max_tokens=40, tenant=A) for index in range(2)]
    driver.step()
    quiet = driver.submit([5], max_tokens=2, tenant=B)
    for _ in range(4):
        driver.step()
    assert finished(quiet)
    assert [request.preemptions for request in flood] == [0, 1]
    driver.drain()
    assert all(map(finished, flood))
