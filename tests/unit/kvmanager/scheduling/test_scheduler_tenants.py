"""Several tenants under one scheduler: nobody takes what another one's floor keeps, and everything ends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.engine.scheduler_driver import VOCAB, Driver, expect, finished, output

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus

NO_BLOCKS = np.empty(0, np.int32)


def fill(driver: Driver, tenant: int, num_blocks: int) -> None:
    """Caches a prompt of so many blocks."""
    prompt = [(7 * tenant + at) % VOCAB for at in range(num_blocks * driver.block_size)]
    driver.submit(prompt, max_tokens=1, identity=CacheIdentity(str(tenant)), tenant=Tenant("", tenant))
    driver.drain()


def footprint(driver: Driver, tenant: int) -> int:
    assert driver.pool.tenants is not None
    return driver.pool.tenants.footprint(tenant)


def watch_floors(monkeypatch: pytest.MonkeyPatch, floors: dict[int, int]) -> None:
    """Every allocation is held against the floors, and none goes over them on purpose."""
    allocate = BlockPool.allocate

    def watched(self: BlockPool, count: int, on_evict: Any = None, tenant: int = 0, **more: Any) -> Blocks | None:
        assert self.tenants is not None
        assert not more.get("over_floors")
        before = [self.tenants.footprint(other) for other in range(4)]
        blocks = allocate(self, count, on_evict, tenant, **more)
        for other in {0, 1, 2, 3} - {tenant}:
            assert self.tenants.footprint(other) >= min(before[other], floors.get(other, 0))
        return blocks

    monkeypatch.setattr(BlockPool, "allocate", watched)


# Each a random history over a driver of its own sizes. The first twelve have each combination of what seeds switch on
# twice; the others differ in what chance has chosen.
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 40))]
)
def test_everything_ends_and_no_floor_is_touched(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    num_blocks = chance.choice([12, 20, 40])
    driver = Driver(
        num_blocks=num_blocks,
        block_size=2,
        max_batch_tokens=chance.choice([6, 16, 64]),
        max_running=chance.choice([2, 5, 9]),
        watermark=chance.choice([0.0, 0.1, 0.3]),
        partial_hits=bool(seed % 2),
        protected_share=chance.choice([None, 0.4]),
        host_blocks=chance.choice([0, 10]),
        preemption=chance.choice(["swap", "recompute"]),
        write_back=bool(seed % 3),
        preemption_limit=chance.choice([0, 3]),
    )
    floors = {tenant: num_blocks // chance.choice([3, 5, 8]) for tenant in chance.sample(range(4), 3)}
    driver.scheduler.set_tenants({tenant: chance.choice([0.5, 1.0, 3.0]) for tenant in range(4)}, floors)
    watch_floors(monkeypatch, floors)
    for _ in range(80):
        tenant = chance.randrange(4)
        shape: dict[str, Any] = chance.choice([{}, {}, {}, {"n": 3}, {"beam_width": 2}])
        tenants = driver.pool.tenants
        assert tenants is not None
        most = tenants.most_for(tenant, NO_BLOCKS) // shape.get("beam_width", 1) * 2
        if not most:
            # Refused at submission.
            continue
        total = chance.randint(2, most + 1)
        known = chance.randint(1, total - 1)
        prompt = [chance.randrange(2) for _ in range(known)]
        identity = CacheIdentity(str(tenant))
        driver.submit(prompt, total - known, chance.randrange(2), identity=identity, tenant=Tenant("", tenant), **shape)
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.randrange(40) == 0:
            driver.lose_executor()
    driver.drain()
    for request in driver.requests:
        assert finished(request)
        for sequence in request.sequences if request.search is None else ():
            wanted = expect(request.command.prompt_ids, request.command.sampling.max_tokens)
            assert output(request, sequence.index) == wanted


def test_admission_waits_for_blocks_that_it_may_have() -> None:
    """Tenant 2 has 6 of 10 blocks to use; what tenant 1 keeps does not count as free."""
    driver = Driver(num_blocks=10, block_size=2)
    driver.scheduler.set_tenants({}, {1: 4})
    fill(driver, 1, 4)
    first = driver.submit([1] * 7, max_tokens=2, tenant=Tenant("", 2))
    second = driver.submit([2] * 7, max_tokens=2, tenant=Tenant("", 2))
    driver.plan()
    assert [request.sequences[0].state for request in (first, second)] == [SeqStatus.RUNNING, SeqStatus.WAITING]
    driver.drain()
    assert finished(second)
    assert footprint(driver, 1) == 4


def test_nobody_is_preempted_for_nothing() -> None:
    """The last in order has no more than its tenant's floor: the one in need waits itself instead."""
    driver = Driver(num_blocks=4, block_size=4)
    driver.scheduler.set_tenants({}, {1: 1})
    older = driver.submit([1, 2, 3, 4], max_tokens=9, tenant=Tenant("", 2))
    other = driver.submit([5, 6, 7, 8], max_tokens=5, tenant=Tenant("", 2))
    within = driver.submit([9], max_tokens=4, tenant=Tenant("", 1))
    driver.drain()
    assert all(finished(request) for request in (older, other, within))
    assert [request.preemptions for request in (older, other, within)] == [0, 1, 0]


def submit_growing(driver: Driver, tenant: int, num_blocks: int) -> LiveRequest:
    """A request that fills all of so many blocks but the last when it has got its first tokens."""
    number = len(driver.requests)
    prompt = [(number * (at + 1) + at) % VOCAB for at in range((num_blocks - 1) * driver.block_size - 2)]
    return driver.submit(prompt, driver.block_size + 1, tenant=Tenant("", tenant), identity=CacheIdentity(str(number)))


def test_a_tenant_is_preempted_down_to_its_floor_and_no_further() -> None:
    """Blocks given up beyond the floor stay cached for it. So the next victim is a tenant with blocks to give."""
    driver = Driver(num_blocks=160, block_size=16, max_batch_tokens=4096, max_running=24, watermark=0.01, depth=1)
    driver.scheduler.set_tenants({}, {1: 99})
    first = submit_growing(driver, 2, 10)
    within, other = ([submit_growing(driver, tenant, 10) for _ in range(count)] for tenant, count in ((1, 11), (3, 4)))
    while driver.pool.num_free:
        assert driver.step()
    assert [footprint(driver, tenant) for tenant in (1, 2, 3)] == [110, 10, 40]
    driver.scheduler.waiting.served.charge_output(3, 1000)
    late = submit_growing(driver, 2, 20)
    while late.sequences[0].state is not SeqStatus.RUNNING:
        assert driver.step()
    # After two it holds 90. The first gave ten blocks, the second the one that was not full.
    assert [request.preemptions for request in within] == [0] * 9 + [1] * 2
    assert [request.preemptions for request in other] == [0, 0, 0, 1]
    driver.drain()
    assert all(finished(request) for request in (first, late, *within, *other))


@pytest.mark.parametrize(("num_blocks", "fits"), [(5, True), (20, True), (21, False)])
def test_a_floor_keeps_blocks_and_no_running_slots(num_blocks: int, fits: bool) -> None:
    """A tenant within its floor gives a slot to one that has been served less, unless that lacks blocks as well."""
    driver = Driver(num_blocks=100, block_size=16, max_batch_tokens=4096, max_running=4, depth=1)
    driver.scheduler.set_tenants({}, {1: 50})
    fill(driver, 1, 20)
    first = submit_growing(driver, 2, 31)
    within = [submit_growing(driver, 1, 11) for _ in range(3)]
    while not all(request.sequences[0].state is SeqStatus.RUNNING for request in (first, *within)):
        assert driver.step()
    assert (footprint(driver, 1), driver.pool.num_free_for(2)) == (50, 20)
    late = driver.submit([50] * (16 * num_blocks - 4), max_tokens=2, tenant=Tenant("", 2))
    driver.step()
    driver.plan()
    assert (late.sequences[0].state is SeqStatus.RUNNING) == fits
    assert [request.preemptions for request in within] == [0, 0, int(fits)]
    driver.drain()
    assert all(finished(request) for request in (first, late, *within))


def test_searches_of_two_tenants_do_not_preempt_each_other_in_turns() -> None:
    """Either takes all slots, computes its beams again in two steps, and would have less than its share of one slot."""
    driver = Driver(num_blocks=12, max_batch_tokens=5, max_running=3)
    driver.scheduler.set_bound(StepBound(tokens=19, decode=1.0, visited=15))
    requests = []
    for tenant, priority, prompt, n, max_tokens, steps in (
        (2, 1, [1, 0, 1, 0, 1, 0], 1, 8, 4),
        (2, 0, [1, 1, 0], 3, 4, 4),
        (1, 1, [0, 0], 1, 8, 1),
    ):
        requests.append(driver.submit(prompt, max_tokens, priority, n, beam_width=3, tenant=Tenant("", tenant)))
        for _ in range(steps):
            driver.step()
    driver.drain(1000)
    assert all(finished(request) for request in requests)


@pytest.mark.parametrize("n", [1, 2])
def test_floors_that_rose_too_late_stop_nobody(n: int) -> None:
    """A request that was accepted before goes over them, once it is alone."""
    driver = Driver(num_blocks=8, block_size=2)
    fill(driver, 1, 6)
    request = driver.submit([1] * 4, max_tokens=9, n=n, tenant=Tenant("", 2))
    driver.step()
    driver.scheduler.set_tenants({}, {1: 6})
    later = driver.submit([2] * 3, max_tokens=1, tenant=Tenant("", 2))
    driver.drain()
    assert finished(request)
    assert finished(later)
    assert footprint(driver, 1) < 6


def test_the_configuration_outlives_the_pool() -> None:
    driver = Driver(num_blocks=10, block_size=2)
    driver.scheduler.set_tenants({1: 2.0}, {1: 4, 2: 2})
    with pytest.raises(ValueError, match="11 blocks together, the pool has 10"):
        driver.scheduler.set_tenants({}, {1: 11})
    driver.lose_executor()
    assert driver.pool.tenants is not None
    assert driver.pool.tenants.floors_beside(0) == 6
    # A smaller pool keeps as much of it for each.
    driver._new_pool(3)
    driver.scheduler.lose_executor(driver.pool, driver.scheduler.limits, (), driver.host)
    assert driver.pool.tenants is not None
    assert [driver.pool.tenants.floors_beside(tenant) for tenant in (0, 1, 2)] == [3, 1, 2]


def test_without_a_prefix_cache_there_is_nothing_to_keep() -> None:
    driver = Driver(num_blocks=10, block_size=2, prefix_cache=False)
    driver.scheduler.set_tenants({}, {1: 4})
    assert driver.pool.num_free_for(2) == 10


@pytest.mark.parametrize(("width", "max_tokens"), [(2, 12), (3, 9)])
def test_floors_that_rose_under_a_search_stop_nobody(width: int, max_tokens: int) -> None:
    """Beams of a search hold blocks while others of it wait for some, which no other request is to give back."""
    driver = Driver(num_blocks=20, block_size=2, max_running=8)
    driver.scheduler.set_tenants({1: 1.0, 2: 1.0}, {})
    driver.submit(list(range(1, 72, 3)), max_tokens=1, tenant=Tenant("", 2))
    driver.drain()
    search = driver.submit([1, 4, 7, 10], max_tokens=max_tokens, beam_width=width, tenant=Tenant("", 1))
    for _ in range(6):
        driver.step()
    driver.scheduler.set_tenants({1: 1.0, 2: 1.0}, {2: 14})
    later = driver.submit([1, 4, 7], max_tokens=3, tenant=Tenant("", 2))
    driver.drain()
    assert finished(search)
    assert finished(later)
    assert driver.pool.num_active == 0


def test_a_configuration_that_stays_is_fitted_to_a_smaller_pool() -> None:
    """As when a tenant comes that was not there before: weights change, floors do not."""
    driver = Driver(num_blocks=20, block_size=2)
    driver.scheduler.set_tenants({}, {1: 12})
    driver._new_pool(10)
    driver.scheduler.lose_executor(driver.pool, driver.scheduler.limits, (), driver.host)
    driver.scheduler.set_tenants({1: 2.0, 2: 1.0}, {1: 12})
    assert driver.pool.tenants is not None
    assert driver.pool.tenants.floors_beside(2) == 10
    with pytest.raises(ValueError, match="13 blocks together, the pool has 10"):
        driver.scheduler.set_tenants({}, {1: 13})


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_token_of_a_prompt_is_charged_once(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(block_size=4, max_batch_tokens=8, depth=1, prefix_cache=prefix_cache)
    charged: list[tuple[int, int]] = []
    served = driver.scheduler.waiting.served
    monkeypatch.setattr(served, "charge_prompt", lambda tenant, tokens: charged.append((tenant, tokens)))
    request = driver.submit(list(range(30)), max_tokens=3, tenant=Tenant("", 7))
    for _ in range(2):
        driver.step()
    driver.scheduler.preempt_all()
    driver.drain()
    assert finished(request)
    assert {tenant for tenant, _ in charged} == {7}
    assert sum(tokens for _, tokens in charged) == 30
