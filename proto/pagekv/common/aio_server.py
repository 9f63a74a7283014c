"""gRPC's asyncio server, without a defect of grpcio by which any caller can end it.

grpcio 1.84 and 1.85 accept all calls in one task, which also decodes the names of unregistered methods. A name that is
not UTF-8 ends this task, and with it the server and every call on it, or the process. One frame of anybody who can
connect is enough. The server here answers calls of unregistered methods without looking at their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from pagekv.common.logs import Log

log = Log(__name__)

# Private names of grpcio that the class below uses, besides its own methods.
_INSIDE = ("_MethodResolver", "_handle_rpc", "_schedule_rpc_coro")


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    """Accepts calls of unregistered methods in a separate task."""

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        # The task ends when the server accepts no more calls, with the error that gRPC's own task expects then.
        return asyncio.get_running_loop().create_task(self._refuse_unregistered())

    async def _refuse_unregistered(self) -> None:
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        answering = set[asyncio.Task[None]]()
        while True:
            call = await self._request_call()
            # The answer is UNIMPLEMENTED, because no handler has the empty name.
            answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """A server for registered methods; generated code registers them. With releases of grpcio that have the defect, a
    handler that was added by `add_generic_rpc_handlers` alone is not found.
    """
    plain = cygrpc.AioServer
    # Releases without registered methods decode a name in the task of its call, where an error harms no other call.
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
