"""The parts of a gRPC server that both processes share: limits, health, reflection, error statuses, SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import inspect
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc

from pagekv.common import health
from pagekv.common.aio_server import aio_server
from pagekv.common.cannot_listen import IN_USE, is_served, why_not_listen
from pagekv.common.errors import InvalidRequest, PageKVError
from pagekv.common.freed_memory import keep_freed_memory, touch_memory
from pagekv.common.large_messages import SMALL_BYTES, Bounds, read_large
from pagekv.common.logs import Log
from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.common.parent import call_without_parent
from pagekv.common.statuses import abort_with
from pagekv.common.unknown_fields import check_known

log = Log(__name__)

# Metadata key of Run: the epoch of its steps (P3).
EPOCH_KEY = "pagekv-epoch"
# Most connections to a port, and the file descriptors that are kept for everything else: the link between the
# processes, the HTTP port, files. If descriptors are few, connections get at least half of them.
MAX_CONNECTIONS = 4096
KEPT_DESCRIPTORS = 256
# With fewer no server starts. A manager has 20 before its first connection, and gRPC crashes where it gets none.
LEAST_DESCRIPTORS = 64
# Milliseconds after which a connection that does not speak HTTP/2 is closed; and after which a connection without calls
# is closed, or a call without a request is ended. Clients connect again by themselves for their next call.
HANDSHAKE_MS = 10_000
IDLE_MS = 60_000
# Freed memory that a process keeps for its next messages, and the part that it has from the start: six copies of the
# largest message.
KEPT_BYTES = 128 * 2**20
TOUCHED_BYTES = 6 * MAX_RECEIVE_BYTES
# Garbage collections of the middle generation before a full one; CPython's default is 10. A call that waits or streams
# has some 110 objects, most of them gRPC's, so with 1,200 calls a full collection stops the process for 50 ms. A call
# that has ended leaves 4 KB in reference cycles.
MIDDLE_COLLECTIONS = 100
# Most calls that have arrived and are not accepted yet, as many as two connections can have. gRPC's default is a
# thousand; beyond it gRPC ends calls at random with CANCELLED, no matter which caller has so many.
MAX_PENDING_CALLS = 8192
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_metadata_size", 16 * 2**10),
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a silent second server
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),  # else pings of a connection without a call end it
]


# Called with the full name of a method and the context of a call to it, before the call's request is read. Raises
# Unauthenticated, PermissionDenied or InvalidRequest.
Admit = Callable[[str, Any], Awaitable[None]]
# Called with the method, the context and the error of a call that was refused or could not be answered.
Refused = Callable[[str, Any, PageKVError], None]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a `PageKVError` of any handler into its status, and any other exception into INTERNAL with a logged
    traceback. Refuses a request whose bytes are no message, that has too many fields or that has an unknown field. A
    handler with a stream of requests gets them as bytes and does these checks itself. The messages of health and
    reflection are gRPC's own: their unknown fields are ignored, and handlers with a stream of requests get messages.
    Since strangers may send them, and a watch holds its request for as long as it likes, they are small.

    gRPC sees every method as one with a stream of requests, because it calls the handlers of such methods as soon as
    the headers are there. So a call is admitted and counted even if its request never comes, and is ended if that takes
    too long.

    A handler with a stream of answers is an async generator of messages or, where every microsecond counts, a coroutine
    that calls `context.write` itself, with serialised messages. Other handlers return a message or its bytes.
    """

    def __init__(self, admit: Admit | None = None, refused: Refused | None = None) -> None:
        """`admit` decides about every call; without it all calls are admitted. `refused` is called with each error."""
        self._admit = admit
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = await continuation(handler_call_details)
        method = handler_call_details.method
        if found is None:
            return found
        own = not method.startswith("/grpc.")
        # Any: the type stubs know only blocking handlers, and these are coroutines and async generators.
        handler: Any = found
        parse = handler.request_deserializer

        async def read(data: bytes) -> Any:
            if parse is None:
                return data
            if not own and len(data) > SMALL_BYTES:
                raise InvalidRequest("", f"must be at most {SMALL_BYTES} bytes, has {len(data)}")
            try:
                if len(data) > SMALL_BYTES:
                    request = parse(b"")
                    await read_large(request, data, Bounds())
                    return request
                request = parse(data)
            except DecodeError as error:
                # gRPC itself would end the call with UNKNOWN.
                raise InvalidRequest(
                    "", f"must be the message of {method}, but its bytes cannot be read: {error}"
                ) from error
            if own:
                check_known(request)
            return request

        async def read_all(context: Any) -> AsyncIterator[Any]:
            while (data := await _next_request(context)) is not grpc.aio.EOF:
                yield await read(data)

        async def begun(requests: AsyncIterator[bytes], context: Any) -> Any:
            """The argument of the handler: the one request of its call, or the stream of requests."""
            if self._admit is not None:
                await self._admit(method, context)
            if handler.request_streaming:
                return requests if own else read_all(context)
            return await read(await _only_request(context))

        if handler.response_streaming:
            inner_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream
            writes = inspect.iscoroutinefunction(inner_stream)

            async def stream(requests: Any, context: Any) -> None:
                try:
                    # A handler may free its request long before it ends, so nothing here keeps it.
                    if writes:
                        await inner_stream(await begun(requests, context), context)
                        return
                    async for response in inner_stream(await begun(requests, context), context):
                        await context.write(response)
                except grpc.aio.InternalError:
                    raise  # the caller has gone while it was written to: gRPC ends the call
                except Exception as error:
                    await self._abort(context, method, error)

            return grpc.stream_stream_rpc_method_handler(stream, None, None if writes else handler.response_serializer)
        inner_unary, serialise = handler.unary_unary, handler.response_serializer

        async def unary(requests: Any, context: Any) -> Any:
            try:
                return await inner_unary(await begun(requests, context), context)
            except Exception as error:
                await self._abort(context, method, error)

        def written(response: Any) -> Any:
            return response if serialise is None or isinstance(response, bytes) else serialise(response)

        return grpc.stream_unary_rpc_method_handler(unary, None, written)

    async def _abort(self, context: Any, method: str, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, PageKVError):
            # Without the message, which may have a value of the caller's.
            field = getattr(error, "field", "")
            log.debug("a call was refused", method=method, error=type(error).__name__, field=field)
            if self._refused is not None:
                self._refused(method, context, error)
            await abort_with(context, error)
        log.exception("unexpected error in a handler", method=method)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error in {method}; the server's log has the details")


async def _only_request(context: Any) -> bytes:
    """The request of a call with one request. Raises InvalidRequest if none comes."""
    request = await _next_request(context)
    if request is grpc.aio.EOF:
        raise InvalidRequest("", "the call ended without a request")
    found: bytes = request
    return found


async def _next_request(context: Any) -> Any:
    """The next request of a call, or EOF. Raises InvalidRequest if the caller waits too long with it."""
    try:
        async with asyncio.timeout(IDLE_MS / 1000):
            # Not with the iterator of requests, because asyncio would close it in a task of its own for every call.
            return await context.read()
    except TimeoutError:
        raise InvalidRequest("", f"no request came within {IDLE_MS / 1000:g} s of the call") from None


class GrpcServer:
    """A grpc.aio server with health and reflection. States: built, `start`ed (NOT_SERVING), serving, stopped."""

    def __init__(
        self,
        listen: str,
        services: Sequence[str],
        reflection: bool = True,
        *,
        credentials: grpc.ServerCredentials | None = None,
        admit: Admit | None = None,
        refused: Refused | None = None,
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`listen`: host:port or unix:/path. `services`: full names of the services, for health and reflection.
        `credentials`: for TLS. `admit` decides who may call what; without it everybody may call everything. `refused`
        is called for each call that ends with an error. `connections`: most connections, or fewer if file descriptors
        are few. Raises OSError if they are too few to serve at all.
        """
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors < LEAST_DESCRIPTORS:
            raise OSError(
                f"this process may have {descriptors} open files, and needs {LEAST_DESCRIPTORS} or more: raise its "
                "limit (ulimit -Hn; LimitNOFILE= of systemd)"
            )
        self._listen = listen
        self._credentials = credentials
        self._names = [*services]
        options = dict(SERVER_OPTIONS)
        options |= {
            "grpc.max_allowed_incoming_connections": min(connections, connection_limit()),
            "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
            "grpc.max_connection_idle_ms": IDLE_MS,
            "grpc.max_receive_message_length": MAX_RECEIVE_BYTES,
        }
        self.server = aio_server((ErrorInterceptor(admit, refused),), list(options.items()))
        self._health = health.HealthService(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._reflection = reflection
        self.port = 0

    async def start(self) -> int:
        """Binds and listens; health says NOT_SERVING until `set_serving`. Returns the port. Raises OSError."""
        if is_served(self._listen):
            raise OSError(f"cannot listen on {self._listen}: {IN_USE}")
        if self._reflection:
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection(
                [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
            )
        try:
            if self._credentials is None:
                self.port = self.server.add_insecure_port(self._listen)
            else:
                self.port = self.server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as error:
            await self.server.stop(None)
            raise OSError(f"cannot listen on {self._listen}: {why_not_listen(self._listen)}") from error
        await self.server.start()
        return self.port

    def set_serving(self, serving: bool) -> None:
        """Sets the health of the whole process and of each service."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, then cancels them."""
        await self.server.stop(grace_s)


def connection_limit() -> int:
    """Most connections to a port, by the number of file descriptors that this process may have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max(descriptors // 2, descriptors - KEPT_DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """Raises this process's limit of file descriptors to the number that it may need, as far as it is allowed to.
    Shells and containers often set 1024, which a process can raise only by itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * MAX_CONNECTIONS)), hard))


def stop_event() -> asyncio.Event:
    """An event that is set by SIGTERM, by SIGINT, and by the end of a parent that asked for it."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, event.set)
    call_without_parent(loop, event.set)
    return event


def prepare_to_serve() -> None:
    """Hides all objects made so far (modules, pools, models) from the garbage collector, because a full collection over
    them would stop the process for as long as one or more steps. Makes full collections over later objects rare.
    Touches memory for the first messages. To be called once, before serving.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], MIDDLE_COLLECTIONS)
    touch_memory(TOUCHED_BYTES)


def run_async(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a process's main coroutine, on uvloop where it is installed."""
    raise_descriptor_limit()
    keep_freed_memory(KEPT_BYTES)
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
