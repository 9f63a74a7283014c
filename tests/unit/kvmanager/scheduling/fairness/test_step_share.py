"""Steps that have a bound: which sequences decode, and that none waits for long."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output

from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.step_share import BESIDE_NEWCOMER, PATIENCE
from pagekv.kvmanager.scheduling.fairness.visitors import STEPS_BEHIND
from pagekv.kvmanager.scheduling.sequence import SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepPlan

A, B, C = (Tenant(name, number) for number, name in enumerate("abc", 1))


def decoding(driver: Driver, plan: StepPlan) -> Counter[str]:
    """Sequences that decode in a step just planned, by tenant."""
    rows = set(plan.sampling.tolist()) - set(plan.prefilled)
    return Counter(driver.scheduler._running.batch.member(row).request.command.tenant.name for row in rows)


def test_one_tenant_has_no_bound() -> None:
    driver, free = Driver(num_blocks=256), Driver(num_blocks=256)
    driver.scheduler.set_bound(StepBound(1, 1.0, 1))
    for each in (driver, free):
        for index in range(8):
            each.submit([index, 1, 2], max_tokens=6, tenant=A)
        each.drain()
    sizes = [[plan.num_tokens for plan in each.plans] for each in (driver, free)]
    assert sizes[0] == sizes[1]
    assert not driver.scheduler.competing


def test_what_tenants_decode_in_a_step_goes_by_weight() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, depth=1)
    driver.scheduler.set_tenants({A.number: 2.0, B.number: 1.0}, {})
    for index in range(8):
        driver.submit([index, 1], max_tokens=40, tenant=A)
        driver.submit([index, 2], max_tokens=40, tenant=B)
    driver.step()
    driver.scheduler.set_bound(StepBound(6, 1.0, 6))
    for _ in range(5):
        plan = driver.plan()
        assert plan is not None
        assert decoding(driver, plan) == {"a": 4, "b": 2}
        assert plan.scheduled_tokens == [0] * 10
        driver.complete()
        driver.check()
    driver.drain()
    for request in driver.requests:
        assert output(request) == expect(list(request.command.prompt_ids), 40)


def test_a_newcomers_prompt_has_the_step_nearly_to_itself() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    flood = [driver.submit([index, 1], max_tokens=60, tenant=A) for index in range(16)]
    driver.submit([9, 9], max_tokens=60, tenant=B)
    driver.step()
    driver.scheduler.set_bound(StepBound(32, 1.0, 32))
    flood.append(driver.submit([7] * 20, max_tokens=4, tenant=A))
    driver.step()
    newcomer = driver.submit([5] * 20, max_tokens=4, tenant=C)
    plan = driver.plan()
    assert plan is not None
    assert [new.sequence.request for new in plan.new] == [newcomer]
    assert (plan.num_decodes, plan.num_tokens) == (32 // BESIDE_NEWCOMER, 32 // BESIDE_NEWCOMER + 20)
    driver.complete()
    assert newcomer.sequences[0].num_output == 1
    driver.drain()
    assert all(map(finished, [*flood, newcomer]))


def test_steps_beside_a_visitor_are_shorter_but_for_its_prompt() -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    for index in range(20):
        driver.submit([index, 1], max_tokens=60, tenant=A)
    driver.step()
    driver.scheduler.set_bound(StepBound(12, 1.0, visited=8))
    visitor = driver.submit([5] * 22, max_tokens=3, tenant=B)
    for _ in range(4 + STEPS_BEHIND + 2):
        driver.step()
        driver.check()
    assert finished(visitor)
    sizes = [plan.num_tokens for plan in driver.plans[1:]]
    assert sizes == [12, 12] + [8] * (2 + STEPS_BEHIND) + [12, 12]
    driver.drain()


@pytest.mark.parametrize(("count", "left"), [(9, 5), (10, 5)])
def test_half_of_those_that_decode_sit_a_newcomers_step_out_though_decodes_seem_to_cost_nothing(
    count: int, left: int
) -> None:
    driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=32, depth=1)
    for index in range(count):
        driver.submit([index, 1], max_tokens=60, tenant=B if index == 9 else A)
    driver.step()
    driver.scheduler.set_bound(StepBound(32, 0.0, 32))
    driver.step()
    assert driver.plans[-1].num_decodes == count
    driver.submit([5] * 20, max_tokens=4, tenant=C)
    driver.step()
    assert (driver.plans[-1].num_decodes, driver.plans[-1].num_tokens) == (left, left + 20)
    driver.drain()


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_is_passed_over_for_long_whatever_comes(seed: int) -> None:
    """Newcomers in every step, tenants of small weight, and steps with room for little."""
    rng = random.Random(seed)
    driver = Driver(num_blocks=2000, block_size=4, max_batch_tokens=128, max_running=64, depth=rng.choice([1, 2]))
    weights = {number: rng.choice([0.01, 1.0, 5.0]) for number in range(1, 30)}
    driver.scheduler.set_tenants(weights, {})
    for index in range(rng.randint(8, 30)):
        driver.submit([index, 3], max_tokens=90, tenant=Tenant("", rng.randint(1, 4)))
    driver.step()
    bound = StepBound(rng.choice([8, 24, 60]), rng.choice([0.5, 1.0, 3.0]), rng.choice([8, 24]))
    driver.scheduler.set_bound(bound)
    least, waited, longest, most = bound.num_decodes(BESIDE_NEWCOMER), Counter[int](), 0, 0
    for at in range(80):
        driver.submit([at % 90, 4, 5], max_tokens=1, tenant=Tenant("", 5 + at % 25))
        plan = driver.plan()
        if plan is None:
            driver.complete()
            continue
        passed = {seq for seq, n in zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True) if not n}
        batch = driver.scheduler._running.batch
        passed = {seq for seq in passed if batch.decoding[seq]}
        for seq in [*waited]:
            if seq not in passed:
                del waited[seq]
        waited.update(passed)
        longest, most = max(longest, *waited.values(), 0), max(most, plan.num_decodes + len(passed))
        if len(driver.in_flight) == driver.depth:
            driver.complete()
    driver.check()
    assert 0 < longest <= PATIENCE + -(-most // least)
    driver.scheduler.set_bound(StepBound(128, 1.0, 128))
    while driver.plan() is not None or driver.complete():
        pass
    assert all(map(finished, driver.requests))


def test_the_budget_keeps_a_token_for_each_sequence_that_is_passed_over() -> None:
    """All of them may decode in the next step, if that is bounded less."""
    driver = Driver(num_blocks=512, max_batch_tokens=8, max_running=32, depth=1)
    for index in range(30):
        driver.submit([index, 1], max_tokens=40, tenant=A if index % 2 else B)
    driver.scheduler.set_bound(StepBound(4, 1.0, 4))
    for _ in range(20):
        driver.step()
    driver.scheduler.set_bound(StepBound(64, 1.0, 64))
    driver.drain()
    assert max(plan.num_tokens for plan in driver.plans) == 8
    assert all(map(finished, driver.requests))


def test_a_head_without_blocks_takes_no_decodes_their_turn() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_batch_tokens=64, depth=1)
    flood = [driver.submit([index, 1, 2, 3, 4], max_tokens=20, tenant=A) for index in range(2)]
    flood += [driver.submit([index, 2, 2, 3, 4], max_tokens=20, tenant=B) for index in range(2)]
    driver.step()
    driver.scheduler.set_bound(StepBound(8, 1.0, 8))
    waits = driver.submit([6] * 40, max_tokens=2, tenant=A)
    for _ in range(3):
        driver.step()
    assert waits.sequences[0].state is SeqStatus.WAITING
    assert driver.plans[-1].num_decodes == 4
    driver.drain()
    assert all(map(finished, [*flood, waits]))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("searches", [1, 3])
def test_beams_that_come_back_do_not_keep_a_newcomer_out(depth: int, searches: int) -> None:
    """Beams are planned before prompts; beside a newcomer's each computes its one token."""
    flooder, steady, newcomer = (Tenant(name, number) for number, name in enumerate("abc", 1))
    driver = Driver(num_blocks=6000, max_batch_tokens=256, max_running=64, depth=depth)

    def turn() -> None:
        if driver.plan() is None or len(driver.in_flight) == depth:
            driver.complete()

    driver.submit([9, 9], max_tokens=900, tenant=steady)
    for number in range(8):
        driver.submit([number, 7], max_tokens=900, tenant=flooder)
    for number in range(searches):
        driver.submit([number, 1, 2], max_tokens=300, beam_width=4, tenant=flooder)
        turn()
    for _ in range(6):
        turn()
    driver.scheduler.set_bound(StepBound(64, 1.0, 64))
    request = driver.submit([5] * 30, max_tokens=2, tenant=newcomer)
    turns = 0
    while not request.sequences[0].num_output:
        turn()
        turns += 1
        assert turns < 6


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("children", [3, 7, 30])
def test_forks_keep_a_step_within_its_bound_and_neither_starve_nor_keep_a_newcomer_out(
    depth: int, children: int
) -> None:
    """Where a step has no room for all of a request's sequences they come in one by one."""
    driver = Driver(num_blocks=6000, max_batch_tokens=256, max_running=64, depth=depth)
    bound = StepBound(24, 1.0, 24)

    def turn() -> None:
        plan = driver.plan()
        if plan is None or len(driver.in_flight) == depth:
            driver.complete()
        if plan is not None and driver.scheduler.competing:
            assert plan.num_tokens - plan.num_decodes <= bound.left_beside(plan.num_decodes)

    driver.submit([9, 9], max_tokens=80, tenant=B)
    driver.scheduler.set_bound(bound)
    forks = [driver.submit([at, 1, 2], max_tokens=6, n=1 + children, tenant=A) for at in range(9)]
    for _ in range(12):
        turn()
    assert any(request.sequences[-1].num_output for request in forks) or children > 24
    newcomer, turns = driver.submit([5] * 20, max_tokens=2, tenant=C), 0
    while not newcomer.sequences[0].num_output:
        turn()
        turns += 1
        assert turns < 6 * depth
    while not all(map(finished, driver.requests)):
        turn()
        turns += 1
        assert turns < 2000
    for request in forks:
        wanted = expect(list(request.command.prompt_ids), 6)
        assert [output(request, at) for at in range(1 + children)] == [wanted] * (1 + children)


def test_a_sequence_that_is_passed_over_is_waited_for_before_anybody_goes_over_a_floor() -> None:
    """The one that should decode found no block and waits: nothing is computed in that step."""
    driver = Driver(num_blocks=10, block_size=2, depth=1)
    driver.scheduler.set_tenants({}, {C.number: 4})
    driver.submit([7] * 8, max_tokens=1, tenant=C)
    driver.drain()
    driver.scheduler.set_bound(StepBound(1, 1.0, 1))
    requests = [driver.submit([1] * 6, max_tokens=5, tenant=A), driver.submit([2] * 5, max_tokens=6, tenant=B)]
    tenants = driver.pool.tenants
    assert tenants is not None
    while driver.step():
        assert tenants.footprint(C.number) == 4
    assert all(map(finished, requests))
    assert any(not plan.num_tokens and plan.preempted for plan in driver.plans)
