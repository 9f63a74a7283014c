"""Health over HTTP, for load balancers and orchestrators that cannot call `grpc.health.v1`."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

HEALTH, READY = "/health", "/ready"


def health_routes(not_ready: Callable[[], str]) -> list[web.AbstractRouteDef]:
    """`/health` is 200 while the process answers. `/ready` is 200 while it serves requests, else 503 with the reason
    that `not_ready` gives; empty: it serves.
    """

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    return [web.get(HEALTH, health), web.get(READY, ready)]
