"""Tenants as operators see them, at moments of a history."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.engine.engine_harness import config
from support.engine.scheduler_driver import Driver

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.engine.tenant_list import TENANTS_AT_ONCE, tenant_blocks, tenant_list
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.tenants.accounts import Accounts
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import operator_service_pb2 as pb


def state(accounts: Accounts, driver: Driver | None = None) -> EngineState:
    cache = CacheAdmin(True, 0.5, lambda: None)
    scheduler = None if driver is None else driver.scheduler
    return EngineState(config(), cache, LiveRequests(0), scheduler=scheduler, accounts=accounts)


def listed(state: EngineState) -> list[pb.TenantInfo]:
    return list(asyncio.run(tenant_list(state)).tenants)


def queue(state: EngineState, name: str, tenant: str, tokens: int) -> None:
    """Queues a request of a tenant."""
    assert state.scheduler is not None
    command = GenerateCommand(
        name, list(range(tokens)), SamplingParams(max_tokens=4), tenant=state.accounts.tenant(tenant)
    )
    state.scheduler.add(state.live.add(command, bytes(32)))


def test_none_where_nobody_is_asked_for_an_identity() -> None:
    driver = Driver()
    accounts = Accounts()
    accounts.of("").usage.requests += 1
    assert listed(state(accounts, driver)) == []
    assert tenant_blocks(state(accounts, driver)) == []


def test_nothing_before_an_executor_is_attached() -> None:
    accounts = Accounts()
    accounts.of("a")
    with pytest.raises(Unavailable):
        listed(state(accounts))
    # Metrics are read all the same.
    assert tenant_blocks(state(accounts)) == [(accounts.of("a"), 0)]


def test_limits_are_present_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        "[tenants.b]\nweight = 2\nmax_running = 3\nmax_waiting = 1\ntokens_per_minute = 4\nmax_blocks = 5\n"
        "max_pinned_blocks = 0\nmax_watchers = 0\nmax_calls = 9\ntokenized_bytes_per_second = 1_099_511_627_776\n"
        'priorities = [-1, 0]\nadapters = ["y", "", "x"]\nfloor_blocks = 7\n[tenants.a]\n'
    )
    first, second = listed(state(Accounts(path), Driver()))
    assert first == pb.TenantInfo(name="a", weight=1, any_adapter=True)
    assert second == pb.TenantInfo(
        name="b", weight=2, max_running=3, max_waiting=1, tokens_per_minute=4, max_blocks=5, max_pinned_blocks=0,
        max_watchers=0, max_calls=9, tokenized_bytes_per_second=2**40, min_priority=-1, max_priority=0,
        adapters=["", "x", "y"], floor_blocks=7,
    )  # fmt: skip  # several entries a line: one each would fill a screen


def test_no_adapter_is_not_any() -> None:
    accounts = Accounts()
    accounts.of("a").set_limits(TenantLimits(adapters=frozenset()))
    (info,) = listed(state(accounts, Driver()))
    assert (info.any_adapter, list(info.adapters)) == (False, [])


def test_what_each_took() -> None:
    accounts = Accounts()
    account = accounts.of("a")
    account.watchers, usage = 2, account.usage
    usage.requests, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens = 3, 40, 30, 5
    usage.block_seconds = 1.5
    usage.refusals["max_running"] += 6
    assert listed(state(accounts, Driver()))[0] == pb.TenantInfo(
        name="a", weight=1, any_adapter=True, watchers=2, requests_total=3, prompt_tokens_total=40,
        cached_tokens_total=30, output_tokens_total=5, block_seconds_total=1.5, refusals_total={"max_running": 6},
    )  # fmt: skip  # several entries a line: one each would fill a screen


def test_requests_and_blocks_now() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    now = state(Accounts(), driver)
    for name, tenant, tokens in (("one", "b", 12), ("two", "a", 4), ("three", "a", 100), ("four", "c", 100)):
        queue(now, name, tenant, tokens)
    driver.plan()
    shown = [
        (info.name, info.running_requests, info.waiting_requests, info.blocks)
        for info in asyncio.run(EngineSnapshots(now).list_tenants()).tenants
    ]
    assert shown == [("a", 1, 1, 1), ("b", 1, 0, 3), ("c", 0, 1, 0)]
    assert [(account.tenant.name, blocks) for account, blocks in EngineStatistics(now).tenant_blocks()] == [
        ("b", 3),
        ("a", 1),
        ("c", 0),
    ]


def test_several_sequences_of_a_request_are_one() -> None:
    driver = Driver(num_blocks=32)
    now = state(Accounts(), driver)
    assert now.scheduler is not None
    command = GenerateCommand("r", [1] * 9, SamplingParams(max_tokens=4), n=3, tenant=now.accounts.tenant("a"))
    now.scheduler.add(now.live.add(command, bytes(32)))
    driver.plan()
    driver.complete()
    driver.plan()
    (info,) = listed(now)
    assert (info.running_requests, info.waiting_requests) == (1, 0)


def test_many_tenants_are_written_in_slices() -> None:
    accounts = Accounts()
    for number in range(TENANTS_AT_ONCE + 3):
        accounts.of(f"t{number:04}")
    turns = 0

    async def body() -> list[pb.TenantInfo]:
        nonlocal turns
        asking = asyncio.create_task(tenant_list(state(accounts, Driver())))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        return list(asking.result().tenants)

    assert [info.name for info in asyncio.run(body())] == [f"t{number:04}" for number in range(TENANTS_AT_ONCE + 3)]
    assert turns > 1
