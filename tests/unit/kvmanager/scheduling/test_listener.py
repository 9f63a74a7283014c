"""A listener is told of every call to the scheduler before anything is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.scheduling.listener import SchedulerListener
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import SeqStatus

CALLS = [name for name in vars(SchedulerListener) if not name.startswith("_")]


class Listing(SchedulerListener):
    """Lists the calls, each with the number of sequences that wait and of blocks that are free."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.scheduler: Scheduler | None = None
        for name in CALLS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def note(*arguments: object) -> None:
            scheduler = self.scheduler
            if scheduler is not None:
                self.calls.append((name, scheduler.num_waiting, scheduler.pool.num_free))

        return note


def test_calls_are_told_before_they_decide_and_plans_after() -> None:
    driver, listing = Driver(num_blocks=16, block_size=4, depth=1), Listing()
    driver.scheduler = listing.scheduler = Scheduler(driver.pool, driver.scheduler.limits, (), None, listing)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=3)
    driver.step()
    driver.scheduler.preempt_all()
    driver.scheduler.clear_prefix_cache()
    driver.scheduler.set_tenants({1: 2.0}, {1: 3})
    driver.step()
    driver.abort(request)
    driver.scheduler.finish(request.sequences[0])
    driver.lose_executor()
    assert listing.calls == [
        ("adding", 0, 16),
        ("scheduled", 0, 14),
        ("committing", 0, 14),
        ("preempting_all", 0, 14),
        ("clearing_cache", 1, 16),
        ("tenants_set", 1, 16),
        ("scheduled", 0, 14),
        ("committing", 0, 14),
        ("finishing", 0, 14),
        ("finishing", 0, 16),
        ("epoch_began", 0, 16),
    ]
    assert {s.state for s in request.sequences} == {SeqStatus.FINISHED}


def test_sequences_that_end_by_themselves_are_no_calls() -> None:
    driver, listing = Driver(depth=1), Listing()
    driver.scheduler = listing.scheduler = Scheduler(driver.pool, driver.scheduler.limits, (), None, listing)
    driver.submit([1, 2, 3], max_tokens=2)
    driver.drain()
    assert {name for name, _, _ in listing.calls} == {"adding", "scheduled", "committing"}


def test_a_broken_invariant_is_told() -> None:
    driver, listing = Driver(depth=1), Listing()
    driver.scheduler = listing.scheduler = Scheduler(driver.pool, driver.scheduler.limits, (), None, listing)
    driver.submit([1, 2, 3], max_tokens=2)
    plan = driver.plan()
    assert plan is not None
    with pytest.raises(InvariantError, match="0 tokens of 1 sequences, not 1"):
        driver.scheduler.commit(plan, replace(driver.executor.run(plan), sampled_tokens=[]))
    assert [name for name, _, _ in listing.calls[-2:]] == ["committing", "failed"]
