"""Turns at something that does few things at once: tenants alternate, however many calls one of them has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """Turns for each tenant that has calls; nothing is kept of others."""

    def __init__(self, at_once: int = 1) -> None:
        """So many calls of a tenant have a turn at once."""
        self._at_once = at_once
        # By tenant, with how many calls hold it or wait for it.
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """A turn of a tenant, in the order in which its calls ask; it waits for no call of another tenant."""
        turns, calls = self._turns.get(tenant) or (asyncio.Semaphore(self._at_once), 0)
        self._turns[tenant] = turns, calls + 1
        try:
            async with turns:
                yield
        finally:
            turns, calls = self._turns.pop(tenant)
            if calls > 1:
                self._turns[tenant] = turns, calls - 1
