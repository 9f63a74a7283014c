"""Counts by tenant whose sum is known: admission asks for it, and there may be thousands of tenants."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

# A tenant's name or number.
_Tenant = TypeVar("_Tenant", bound=Hashable)


class TenantCounts(Generic[_Tenant]):
    """A count for each tenant. Nothing is kept about tenants with a count of 0: each subject of a token may be a
    tenant, so names would grow without bound.
    """

    def __init__(self) -> None:
        self._counts: dict[_Tenant, int] = {}
        # The sum of all counts.
        self.total = 0

    def __getitem__(self, tenant: _Tenant) -> int:
        return self._counts.get(tenant, 0)

    def __len__(self) -> int:
        """Number of tenants with a count."""
        return len(self._counts)

    def add(self, tenant: _Tenant, more: int) -> None:
        """`more` may be negative."""
        self.total += more
        count = self[tenant] + more
        if count:
            self._counts[tenant] = count
        else:
            self._counts.pop(tenant, None)

    def num_tenants(self, also: _Tenant) -> int:
        """Number of tenants with a count, including the tenant `also`."""
        return len(self._counts) + (also not in self._counts)
