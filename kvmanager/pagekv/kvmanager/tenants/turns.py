"""Turns at something that does one thing after the other: tenants alternate, however many calls one of them has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """One turn for each tenant that has calls; nothing is kept of others."""

    def __init__(self) -> None:
        # By tenant, with how many calls hold it or wait for it.
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """The turn of a tenant: given to its calls in the order in which they ask, and to none after those of another
        tenant.
        """
        lock, calls = self._turns.get(tenant) or (asyncio.Lock(), 0)
        self._turns[tenant] = lock, calls + 1
        try:
            async with lock:
                yield
        finally:
            lock, calls = self._turns.pop(tenant)
            if calls > 1:
                self._turns[tenant] = lock, calls - 1
