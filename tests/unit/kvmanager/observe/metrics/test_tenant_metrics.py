"""Metrics of tenants: by name, as many as there can be, and none without identities."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.engine.engine_harness import config
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.observe.metrics.tenant_metrics import MAX_UNNAMED, TenantCollector
from pagekv.kvmanager.tenants import accounts as accounts_module
from pagekv.kvmanager.tenants.accounts import OTHERS, Accounts


def shown(accounts: Accounts, driver: Driver | None = None) -> dict[str, float]:
    """Values by name and labels, at the first scrape."""
    return scraped(registered(accounts, driver))


def registered(accounts: Accounts, driver: Driver | None = None) -> CollectorRegistry:
    scheduler = None if driver is None else driver.scheduler
    cache = CacheAdmin(True, 0.5, lambda: None)
    state = EngineState(config(), cache, LiveRequests(0), scheduler=scheduler, accounts=accounts)
    registry = CollectorRegistry()
    registry.register(TenantCollector(EngineStatistics(state), accounts))
    return registry


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_nothing_where_nobody_is_asked_for_an_identity() -> None:
    accounts = Accounts()
    accounts.of("").usage.requests += 1
    assert shown(accounts) == {}
    assert shown(accounts, Driver()) == {}


def test_what_a_tenant_took() -> None:
    accounts, driver = Accounts(), Driver(num_blocks=8)
    usage = accounts.of("a").usage
    usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.requests = 40, 30, 20, 10
    usage.block_seconds = 2.5
    usage.refusals.update({"max_running": 3, "tokens_per_minute": 4})
    driver.pool.allocate(5, tenant=accounts.tenant("a").number)
    assert shown(accounts, driver) == {
        'pagekv_tenant_prompt_tokens_total{tenant="a"}': 40,
        'pagekv_tenant_cached_tokens_total{tenant="a"}': 30,
        'pagekv_tenant_output_tokens_total{tenant="a"}': 20,
        'pagekv_tenant_requests_total{tenant="a"}': 10,
        'pagekv_tenant_block_seconds_total{tenant="a"}': 2.5,
        'pagekv_tenant_refusals_total{limit="max_running",tenant="a"}': 3,
        'pagekv_tenant_refusals_total{limit="tokens_per_minute",tenant="a"}': 4,
        'pagekv_tenant_blocks{tenant="a"}': 5,
    }
    # Before an executor is attached there are counts, and no blocks.
    assert shown(accounts)['pagekv_tenant_blocks{tenant="a"}'] == 0


def test_later_tenants_that_nobody_named_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "MAX_TENANTS", MAX_UNNAMED + 5)
    path = tmp_path / "tenants.toml"
    path.write_text("[default]\n[tenants.named]\n")
    accounts = Accounts(path)
    for number in range(MAX_UNNAMED + 3):
        accounts.of(f"t{number}").usage.requests = 1
        accounts.of(f"t{number}").usage.refusals["max_running"] = 2
    # Named later than they came: with a name of its own it leaves its place to another.
    path.write_text("[default]\n[tenants.named]\n[tenants.t102]\n")
    accounts._reload()()
    for name in ("last", "beyond", "far-beyond"):
        accounts.of(name).usage.requests += 10
    requests = {
        name.split('"')[1]: value
        for name, value in shown(accounts).items()
        if name.startswith("pagekv_tenant_requests")
    }
    assert len(requests) == MAX_UNNAMED + 3
    assert (requests["named"], requests["t102"], requests["t99"]) == (0, 1, 1)
    # Two that came too late, "last", and the account that two share.
    assert requests[OTHERS] == 2 + 10 + 20
    assert shown(accounts)['pagekv_tenant_refusals_total{limit="max_running",tenant="*"}'] == 4


def test_no_counter_falls_when_the_file_names_other_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[default]\n[tenants.once]\n")
    accounts = Accounts(path)
    registry = registered(accounts)
    names = [f"t{number}" for number in range(MAX_UNNAMED + 2)]
    before: dict[str, float] = {}
    # The last two come under "*". One of them is named, then one that has a label of its own, then nobody.
    for named in (["once"], ["once", names[-1]], [names[0]], []):
        path.write_text("[default]\n" + "".join(f"[tenants.{name}]\n" for name in named))
        accounts._reload()()
        for name in ("once", *names):
            accounts.of(name).usage.requests += 1
            accounts.of(name).usage.refusals["max_running"] += 1
        after = scraped(registry)
        counters = {name for name in before if "_blocks{" not in name}
        assert {name for name in counters if after.get(name, 0) < before[name]} == set()
        before = after
    requests = 'pagekv_tenant_requests_total{tenant="%s"}'
    assert all(before[requests % name] == 4 for name in ("once", *names[:-2], names[-1]))
    # Four of the one that was never named, and two that the other had when it was.
    assert before[requests % OTHERS] == 4 + 2
    assert before['pagekv_tenant_refusals_total{limit="max_running",tenant="*"}'] == 4 + 2
