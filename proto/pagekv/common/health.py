"""`grpc.health.v1`: whether a process, or one of its services, serves.

grpcio's own service is not used, because it writes to a watcher while it holds the lock that every change of the status
needs. A watcher that stops reading could keep a process from reporting that it serves, or that it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.common.errors import NotFound

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # published without types
    """The servicer, for one event loop. A change waits for no watcher: each reads the latest status when it can."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: the known services, all NOT_SERVING at first; "" is the whole process."""
        self._status = dict.fromkeys(names, health_pb2.HealthCheckResponse.NOT_SERVING)
        # Set at the next change of the status, and then replaced by a new event.
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Sets the status of all services."""
        status = health_pb2.HealthCheckResponse
        self._status = dict.fromkeys(self._status, status.SERVING if serving else status.NOT_SERVING)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            raise NotFound(f"no service {request.service!r} here", "service", request.service)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
                told = status
            await changed.wait()
