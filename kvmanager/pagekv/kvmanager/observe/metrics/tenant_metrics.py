"""Metrics of tenants: what each took, what it was refused, and its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.tenants.accounts import OTHERS, Account, Accounts

# Tenants that the file does not name and that have metrics of their own: names come from callers, and a scrape has
# lines for each. Later ones are summed under OTHERS.
MAX_UNNAMED = 100


@dataclass(slots=True)
class _Sums:
    """Counts of one tenant, or of several together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    block_seconds: float = 0.0
    blocks: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, account: Account, blocks: int) -> None:
        usage = account.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.requests += usage.requests
        self.block_seconds += usage.block_seconds
        self.blocks += blocks
        self.refusals.update(usage.refusals)


_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Of those, found in the prefix cache"),
    ("output_tokens", "Tokens generated"),
    ("requests", "Requests accepted"),
    ("block_seconds", "Blocks, held or cached, times the seconds for which they were the tenant's"),
)


class TenantCollector(Collector):
    """Nothing where callers have no identities. Used on the event loop, between two steps."""

    def __init__(self, statistics: EngineStatistics, accounts: Accounts) -> None:
        """`accounts`: those of the engine that is asked."""
        self._statistics = statistics
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        sums = self._sums()
        if not sums:
            return
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"pagekv_tenant_{name}", text, labels=["tenant"])
            for tenant, each in sums.items():
                counter.add_metric([tenant], getattr(each, name))
            yield counter
        refusals = CounterMetricFamily(
            "pagekv_tenant_refusals", "Calls that a limit of the tenant refused", labels=["tenant", "limit"]
        )
        gauge = GaugeMetricFamily("pagekv_tenant_blocks", "Blocks of the tenant, held and cached", labels=["tenant"])
        for tenant, each in sums.items():
            gauge.add_metric([tenant], each.blocks)
            for limit, count in each.refusals.items():
                refusals.add_metric([tenant, limit], count)
        yield refusals
        yield gauge

    def _sums(self) -> dict[str, _Sums]:
        """By the value of the label; of tenants that are not named the first that came have one of their own."""
        named, unnamed = self._accounts.file.tenants, 0
        sums: dict[str, _Sums] = {}
        for account, blocks in self._statistics.tenant_blocks():
            name = account.tenant.name
            if name not in named and name != OTHERS:
                unnamed += 1
                name = name if unnamed <= MAX_UNNAMED else OTHERS
            sums.setdefault(name, _Sums()).add(account, blocks)
        return sums
