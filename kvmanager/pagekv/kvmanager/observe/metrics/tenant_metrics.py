"""Metrics of tenants: each one's usage, its refused calls, and its blocks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.tenants.accounts import OTHERS, Accounts, TenantUsage

# Most tenants with metrics of their own that the file does not name: names come from callers, and a scrape has lines
# for each. Later tenants are summed under OTHERS.
MAX_UNNAMED = 100


_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Prompt tokens of admitted requests found in the prefix cache"),
    ("output_tokens", "Tokens generated"),
    ("requests", "Requests accepted"),
    ("block_seconds", "The tenant's blocks, held or cached, summed over seconds"),
)


class TenantCollector(Collector):
    """No metrics if callers have no identities. Used on the event loop, between two steps."""

    def __init__(self, statistics: EngineStatistics, accounts: Accounts) -> None:
        """`accounts`: the accounts of the engine whose statistics are read."""
        self._statistics = statistics
        self._accounts = accounts
        # By tenant: the value of the label, from the first scrape with this tenant on.
        self._labels = {OTHERS: OTHERS}
        # Number of tenants with a label of their own that the file did not name when they got it.
        self._unnamed = 0
        # Usage under OTHERS of tenants that the file names by now. It stays under OTHERS, because a counter must not
        # fall.
        self._kept: list[TenantUsage] = []

    def collect(self) -> Iterator[Metric]:
        sums, blocks = self._sums()
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
            gauge.add_metric([tenant], blocks[tenant])
            for limit, count in each.refusals.items():
                refusals.add_metric([tenant, limit], count)
        yield refusals
        yield gauge

    def _sums(self) -> tuple[dict[str, TenantUsage], Counter[str]]:
        """Usage and blocks, by the value of the label."""
        sums: dict[str, TenantUsage] = {}
        blocks: Counter[str] = Counter()
        for account, held in self._statistics.tenant_blocks():
            label = self._label(account.tenant.name, account.usage)
            sums.setdefault(label, TenantUsage()).add(account.usage)
            blocks[label] += held
        for usage in self._kept:
            sums.setdefault(OTHERS, TenantUsage()).add(usage)
        return sums, blocks

    def _label(self, name: str, usage: TenantUsage) -> str:
        """The label of a tenant. Named ones and the first MAX_UNNAMED others have their own and never lose it."""
        label, named = self._labels.get(name), name in self._accounts.file.tenants
        if label is None:
            label = name if named or self._unnamed < MAX_UNNAMED else OTHERS
            self._unnamed += label == name and not named
        elif label == OTHERS and named:
            label = name
            self._kept.append(copy.deepcopy(usage))
        self._labels[name] = label
        return label
