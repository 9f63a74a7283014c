"""gRPC's asyncio server, without a way in which a caller can end it.

grpcio 1.84 and 1.85 decode the name of a method that no service has registered in the task that takes all calls. A name
that is not UTF-8, in one frame of whoever can connect, ends that task and with it the server and every call on it, or
the process. Calls of such methods are answered here, before anything looks at their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from pagekv.common.logs import Log

log = Log(__name__)

# Names of grpcio's inside that the server below needs besides its own methods.
_INSIDE = ("_MethodResolver", "_handle_rpc", "_schedule_rpc_coro")


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    """Takes calls of methods that are not registered in a task of its own."""

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        # Ends when no more calls come, with the error that gRPC's task expects then.
        return asyncio.get_running_loop().create_task(self._refuse_unregistered())

    async def _refuse_unregistered(self) -> None:
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        answering = set[asyncio.Task[None]]()
        while True:
            call = await self._request_call()
            # UNIMPLEMENTED, for nothing has this name.
            answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """A server that serves the methods that are registered, as generated code does; the handlers of
    `add_generic_rpc_handlers` alone are not found by releases of grpcio that have the defect.
    """
    plain = cygrpc.AioServer
    # Releases without registered methods decode within each call.
    if hasattr(plain, "_make_request_call_future"):
        if missing := [name for name in _INSIDE if not hasattr(cygrpc, name)]:
            words = "grpcio is newer than this PageKV: it may end on a method's name that is not UTF-8"
            log.warning(words, grpcio=grpc.__version__, without=", ".join(missing))
        else:
            # grpc.aio.server takes no other class.
            cygrpc.AioServer = _AioServer
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
