"""Turns at a worker that does few things at once: tenants alternate, however many calls each of them has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """Bounds the calls that each tenant has at the worker. Nothing is kept about tenants without calls."""

    def __init__(self, at_once: int = 1) -> None:
        """`at_once`: most calls of one tenant that have a turn at the same time."""
        self._at_once = at_once
        # By tenant: its semaphore, and the number of its calls that hold it or wait for it.
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Gives a tenant's calls their turns, first come, first served; other tenants' calls are not waited for."""
        turns, calls = self._turns.get(tenant) or (asyncio.Semaphore(self._at_once), 0)
        self._turns[tenant] = turns, calls + 1
        try:
            async with turns:
                yield
        finally:
            turns, calls = self._turns.pop(tenant)
            if calls > 1:
                self._turns[tenant] = turns, calls - 1
