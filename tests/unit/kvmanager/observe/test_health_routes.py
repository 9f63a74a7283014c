"""Health and readiness over HTTP."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from pagekv.kvmanager.observe.health_routes import health_routes
from pagekv.kvmanager.observe.http_server import HttpServer


@pytest.mark.parametrize(("listen", "status"), [("127.0.0.1:0", 403), ("0.0.0.0:0", 200)])
def test_ready_follows_the_manager_and_health_the_process(listen: str, status: int) -> None:
    """Load balancers of other machines ask by any name."""
    reason = "no executor is attached"

    async def body() -> None:
        nonlocal reason
        server = HttpServer(listen, health_routes(lambda: reason))
        url = f"http://127.0.0.1:{await server.start()}"
        try:
            async with aiohttp.ClientSession() as session:

                async def ask(path: str, **headers: str) -> tuple[int, str]:
                    async with session.get(url + path, headers=headers) as response:
                        return response.status, await response.text()

                assert await ask("/health") == (200, "ok\n")
                assert await ask("/ready") == (503, "no executor is attached\n")
                reason = ""
                assert await ask("/ready") == (200, "ready\n")
                assert (await ask("/ready", Host="balancer.example"))[0] == status
        finally:
            await server.stop()

    asyncio.run(body())
