"""Random load on scheduler, pins, resets and lost executors: every reader has the table at every step boundary."""

from __future__ import annotations

import random

import pytest
from support.clients.table_reader import Reader, table_of
from support.clock import Clock
from support.engine.cached_prefixes import hold
from support.engine.fake_executor import FakeExecutor
from support.engine.integrity import check_scheduler, pin_tables
from support.engine.scheduler_driver import VOCAB, Driver, expect, finished, output
from support.event_loop import in_event_loop

from pagekv.common.errors import LimitExceeded
from pagekv.kvmanager.engine.answer_check import AnswerCheck
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.capacity import blocks_needed
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.kvcache import block_pool
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepPlan
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.kvmanager.tenants.limits import TenantLimits

BLOCKS, SIZE = 16, 4
ANY = CacheIdentity()


class WatchedDriver(Driver):
    """A driver whose pools have a CacheAdmin, as in the engine loop."""

    def __init__(self, partial_hits: bool) -> None:
        super().__init__(BLOCKS, SIZE, partial_hits=partial_hits)
        self.clock = Clock()
        self.admin = CacheAdmin(True, 0.5, lambda: None, self.clock)
        self.pool = BlockPool(BLOCKS, SIZE, log=self.admin.log)
        self.scheduler = Scheduler(self.pool, self.scheduler.limits, ())
        self.admin.adopt(self.pool, self.scheduler.host, "model", Observer())

    def _send(self, plan: StepPlan) -> None:
        self.admin.count_admissions(plan.admitted)

    def lose_executor(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE, log=self.admin.log)
        self.scheduler.lose_executor(self.pool, self.scheduler.limits, ())
        self.admin.adopt(self.pool, self.scheduler.host, "model", Observer())
        self.in_flight.clear()
        self.executor = FakeExecutor(BLOCKS, SIZE, VOCAB)
        self._answers = AnswerCheck(VOCAB)

    def check(self) -> None:
        sequences = (s for request in self.requests for s in request.sequences)
        check_scheduler(self.scheduler, sequences, self.admin.pins)

    def live_commands(self) -> list[GenerateCommand]:
        return [request.command for request in self.requests if not finished(request)]


class History:
    """One random history."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.driver = WatchedDriver(partial_hits=rng.random() < 0.5)
        self.readers = [Reader(self.driver.admin.log.watch())]
        # Read now and then only.
        self.slow = Reader(self.driver.admin.log.watch())
        self.pins: list[str] = []
        self.steps = 0

    def prompt(self) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 24))]

    def move(self) -> None:
        rng, driver, admin = self.rng, self.driver, self.driver.admin
        move = rng.random()
        if move < 0.3:
            self.submit(self.prompt(), rng.randrange(1, 12), rng.choice((1, 1, 1, 3)), rng.choice((0, 0, 0, 2)))
        elif move < 0.6:
            driver.plan()
        elif move < 0.8:
            driver.complete()
        elif move < 0.88:
            self.pin(self.prompt(), rng.randrange(1, 30))
        elif move < 0.91 and self.pins:
            admin.unpin(rng.choice(self.pins))
        elif move < 0.94:
            self.clock_goes_on(rng.randrange(10))
        elif move < 0.96:
            driver.abort(rng.choice(driver.requests)) if driver.requests else None
        elif move < 0.98:
            admin.reset(driver.scheduler, force=rng.random() < 0.7)
        elif move < 0.99:
            driver.lose_executor()
        else:
            self.readers.append(Reader(admin.log.watch()))

    def submit(self, prompt: list[int], max_tokens: int, n: int, beam_width: int) -> None:
        try:
            self.driver.admin.check_room(blocks_needed(len(prompt) + max_tokens, SIZE, beam_width))
        except LimitExceeded:
            return
        n = min(n, beam_width) if beam_width else n
        self.driver.submit(prompt, max_tokens, n=n, beam_width=beam_width)

    def pin(self, prompt: list[int], lease_s: int) -> None:
        admin = self.driver.admin
        try:
            renewed = self.rng.choice(self.pins) if self.pins and self.rng.random() < 0.3 else ""
            pin = admin.pin(prompt, ANY, lease_s, self.driver.live_commands(), renewed)
        except LimitExceeded:
            return
        if pin.pin_id:
            self.pins.append(pin.pin_id)
            assert len(admin.match(prompt, ANY, None).hits) >= pin.pinned_tokens // SIZE

    def clock_goes_on(self, seconds: int) -> None:
        self.driver.clock.now += seconds
        self.driver.admin._expire()

    def step_boundary(self) -> None:
        """Checks after every step planned or committed, and after calls of services in between."""
        driver, admin = self.driver, self.driver.admin
        self.steps += 1
        admin.log.step_boundary(self.steps)
        driver.check()
        table = table_of(driver.pool)
        for reader in self.readers:
            reader.read()
            assert reader.table == table
        if self.rng.random() < 0.1:
            self.slow.read()
            assert self.slow.table == table
        for blocks in pin_tables(admin.pins):
            assert all(driver.pool.table.digest(block) is not None for block in blocks)
        assert admin.pins.num_blocks <= BLOCKS // 2


@pytest.mark.parametrize("seed", range(6))
@in_event_loop
async def test_readers_hold_the_table_at_every_step_boundary_and_every_request_finishes(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A consumer that replays the events has exactly the manager's table, whatever happens to it, also where all that
    is evicted is cleared later; and pins, which last to the end here, never keep a live request from finishing.
    """
    monkeypatch.setattr(block_pool, "RETIRED_TOGETHER", 1 if seed % 2 else 1000)
    history = History(random.Random(seed))
    driver = history.driver
    for _ in range(250):
        history.move()
        history.step_boundary()
    while driver.step():
        history.step_boundary()
    assert all(finished(request) for request in driver.requests)
    sampled = [request for request in driver.requests if not request.command.sampling.beam_width]
    ran_out = [request for request in sampled if len(output(request)) == request.command.sampling.max_tokens]
    assert ran_out
    for request in ran_out:
        prompt = request.command.prompt_ids
        assert output(request) == expect(prompt, request.command.sampling.max_tokens)
    history.slow.read()
    assert history.slow.table == table_of(driver.pool)
    left = len(driver.admin.pins)
    assert driver.admin.pins.end_all() == left
    assert len(driver.admin.pins) == driver.admin.pins.num_blocks == 0
    assert driver.pool.num_active == 0


def test_a_request_that_floors_leave_no_room_for_is_refused_with_the_reason() -> None:
    """Pinned blocks count where their owner's floor does not keep them already."""
    pool, host = BlockPool(10, 1), HostPool(0, 1)
    admin = CacheAdmin(True, 1.0, lambda: None)
    admin.adopt(pool, host, "model", Observer())
    pool.set_tenants({}, {1: 4, 2: 3})
    admin.check_room(3, 0)
    admin.check_room(7, 1)
    with pytest.raises(LimitExceeded, match="need 4 blocks; 3 of 10 are left: floors of other") as no:
        admin.check_room(4)
    assert (no.value.needed_blocks, no.value.available_blocks) == (4, 3)
    blocks = pool.allocate(5, tenant=1)
    assert blocks is not None
    admin.pins.pin(blocks, 60, 0)
    admin.check_room(2, 0)
    with pytest.raises(LimitExceeded, match=r"2 of 10 are left: .* keep 7 and 5 are pinned"):
        admin.check_room(3, 0)
    admin.check_room(2, 1)
    with pytest.raises(LimitExceeded) as told:
        admin.check_room(3, 1)
    # A tenant learns no number of others.
    assert str(told.value).endswith("need 3 blocks, more than pins and the floors of other tenants leave now")
    assert told.value.metadata == {"needed_blocks": "3"}


def test_a_tenant_that_pins_leave_no_room_for_learns_nothing_of_them() -> None:
    pool, host = BlockPool(10, 1), HostPool(0, 1)
    admin = CacheAdmin(True, 1.0, lambda: None)
    admin.adopt(pool, host, "model", Observer())
    blocks = pool.allocate(5)
    assert blocks is not None
    admin.pins.pin(blocks, 60, 0)
    admin.check_room(5, 1)
    with pytest.raises(LimitExceeded) as told:
        admin.check_room(6, 1)
    assert "need 6 blocks, more than" in str(told.value)
    assert told.value.metadata == {"needed_blocks": "6"}


@in_event_loop
async def test_a_pin_leaves_what_live_requests_of_other_tenants_need() -> None:
    pool, host = BlockPool(10, 1), HostPool(0, 1)
    admin = CacheAdmin(True, 1.0, lambda: None)
    admin.adopt(pool, host, "model", Observer())
    pool.set_tenants({}, {1: 4})
    hold(pool, [1, 2, 3])
    live = GenerateCommand("a", [1, 2], SamplingParams(max_tokens=4), tenant=Tenant("two", 2))
    with pytest.raises(LimitExceeded, match="3 of 10 blocks would be pinned, and a live request may need 9") as no:
        admin.pin([1, 2, 3], ANY, 60, [live])
    assert no.value.available_blocks == 1
    assert admin.pin([1], ANY, 60, [live]).pinned_tokens == 1
    assert admin.pins.end_all() == 1
    admin.close(RuntimeError())


@in_event_loop
async def test_a_tenant_pins_so_many_blocks() -> None:
    """In all of its pins; those of others are none of its own, and a pin is renewed for what it held."""
    pool, admin = BlockPool(10, 1), CacheAdmin(True, 1.0, lambda: None)
    admin.adopt(pool, HostPool(0, 1), "model", Observer())
    one, two = (CacheIdentity(tenant=name) for name in ("one", "two"))
    for tenant in (one, two):
        hold(pool, [1, 2, 3], admin.root(tenant))
    account = Account(Tenant("one", 1), TenantLimits(max_pinned_blocks=3))
    admin.pin([1, 2, 3], two, 60, [], "of two", account=Account(Tenant("two", 2)), owner="two")
    admin.pin([1, 2], one, 60, [], "first", account=account, owner="one")
    with pytest.raises(LimitExceeded, match="max_pinned_blocks: your tenant has 2 of at most 3, and asked for 2 more"):
        admin.pin([1, 2], one, 60, [], "second", account=account, owner="one")
    assert admin.pin([1, 2, 3], one, 60, [], "first", account=account, owner="one").pinned_tokens == 3
    assert account.usage.refusals == {"max_pinned_blocks": 1}
    admin.pins.end_all()
    admin.close(RuntimeError())


@in_event_loop
async def test_pins_in_a_shared_namespace_are_those_of_the_tenant_that_made_them() -> None:
    """The cache identity there has no tenant."""
    pool, admin = BlockPool(10, 1), CacheAdmin(True, 1.0, lambda: None)
    admin.adopt(pool, HostPool(0, 1), "model", Observer())
    own, shared = CacheIdentity(tenant="one"), CacheIdentity(namespace="shared")
    for identity in (own, shared):
        hold(pool, [1, 2], admin.root(identity))
    one, two = (Account(Tenant(name, at), TenantLimits(max_pinned_blocks=3)) for at, name in enumerate(("one", "two")))
    admin.pin([1, 2], shared, 60, [], "of two", account=two, owner="two")
    # None of the other's is counted.
    admin.pin([1, 2], shared, 60, [], "of one", account=one, owner="one")
    # And all of its own.
    with pytest.raises(LimitExceeded, match="max_pinned_blocks: your tenant has 2 of at most 3, and asked for 2 more"):
        admin.pin([1, 2], own, 60, [], "elsewhere", account=one, owner="one")
    admin.pins.end_all()
    admin.close(RuntimeError())
