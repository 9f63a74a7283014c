"""The manager's HTTP port: which requests are answered, and an orderly start and end. The caller gives the routes.

A page of any site can make a browser send requests to loopback ports. So a request has to name this host by a name that
it knows (against DNS rebinding), and requests of another site's page are refused. Metrics and health are for machines:
on a port that other machines can reach, they are answered under any name. Without `admit` everybody who can reach the
port can read everything on it; it is on loopback then, unless a flag allows otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from pagekv.common.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PageKVError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from pagekv.common.loopback import ip_address, is_loopback
from pagekv.kvmanager.observe.http_listener import HttpListener

# Most bytes of a request's body, which is a prompt to explain. Parsing so much JSON takes up to 2 ms.
MAX_BODY_BYTES = 64 * 2**10
# Most connections; and they use at most one in DESCRIPTOR_SHARE of the process's file descriptors.
MAX_CONNECTIONS = 128
DESCRIPTOR_SHARE = 8
# Seconds that a client gets for the handshake of TLS and for the headers of each request; for a body; and to read some
# of an answer.
HEADERS_S = 15.0
BODY_S = 15.0
ANSWER_S = 30.0
# Seconds that open responses get to end.
SHUTDOWN_S = 1.0
# Below this path errors are JSON, as answers are.
API = "/api/"
# Paths for machines, not for browsers; a page of another site can gain nothing from their content.
FOR_MACHINES = frozenset(("/metrics", "/health", "/ready"))

# Subclasses stand before their bases: the first match wins.
_STATUS: dict[type[PageKVError], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    Overloaded: 429,
    Unavailable: 503,
}


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a log record of aiohttp is about an error of this process. Records about malformed requests and clients
    that have gone are dropped, because clients could fill the log with their tracebacks.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, ConnectionError)))


_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_log.addFilter(_is_ours)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
}


class HttpServer:
    """States: built, `start`ed, stopped."""

    def __init__(
        self,
        listen: str,
        routes: Iterable[web.AbstractRouteDef],
        names: Iterable[str] = (),
        *,
        tls: ssl.SSLContext | None = None,
        admit: Callable[[web.Request], Awaitable[None]] | None = None,
        refused: Callable[[web.Request, PageKVError], None] | None = None,
    ) -> None:
        """`listen` is host:port; port 0 means a free port. `names`: further names of the server, in lower case. `admit`
        raises Unauthenticated, PermissionDenied or InvalidRequest for a request that must not be answered; without it
        all requests are answered. `refused` is called for each request that ends with a PageKVError.
        """
        self._tls = tls
        self._admit, self._refused = admit, refused
        host, _, port = listen.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._names = frozenset(names)
        self._app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        self._app.add_routes(routes)
        self._app.on_response_prepare.append(_add_headers)
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=_aiohttp_log,
            auto_decompress=False,  # bodies are small, and no client here compresses any
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=HEADERS_S,
        )
        self._listener: HttpListener | None = None
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = max(1, min(MAX_CONNECTIONS, descriptors // DESCRIPTOR_SHARE))
        # Connections with a request that is being answered.
        self._answering: set[asyncio.BaseProtocol] = set()

    async def start(self) -> int:
        """Binds and listens; returns the port. Raises OSError when the address is taken."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        server.request_handler = _refusing_expectations(server.request_handler)
        server.request_factory = _with_target(server.request_factory)
        self._listener = HttpListener(
            server,
            self._answering,
            most=self._max_connections,
            tls=self._tls,
            handshake_s=HEADERS_S,
            silence_s=ANSWER_S,
        )
        return await self._listener.start(self._host, self._port)

    async def stop(self) -> None:
        """Ends open responses and closes the port. Idempotent."""
        if self._listener is not None:
            await self._listener.stop()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._answering.add(request.protocol)
        try:
            self._check(request)
            if self._admit is not None:
                await self._admit(request)
            if request.can_read_body:
                await _read_body(request)
            return await handler(request)
        except PageKVError as error:
            if self._refused is not None:
                self._refused(request, error)
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
            field = {"field": error.field} if isinstance(error, InvalidRequest) else {}
            # With this header a browser asks its user for a name and a key.
            login = {"WWW-Authenticate": 'Basic realm="PageKV", charset="UTF-8"'} if status == 401 else {}
            return web.json_response({"error": str(error), **field}, status=status, headers=login)
        except web.HTTPException as error:
            if not request.path.startswith(API):
                raise
            headers = {name: value for name, value in error.headers.items() if name != "Content-Type"}
            answer = {"error": (error.text or error.reason).strip()}
            return web.json_response(answer, status=error.status, headers=headers)
        finally:
            self._answering.discard(request.protocol)

    def _check(self, request: web.Request) -> None:
        """Raises HTTPForbidden."""
        if not self._answers_to(request):
            raise web.HTTPForbidden(
                text="this server does not have that name: use its address or localhost, or start the manager with "
                "this name in --http-names\n"
            )
        site, mode = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode"))
        if site == "cross-site" and mode != "navigate":
            raise web.HTTPForbidden(text="refused, because a page of another site sent this request\n")

    def _answers_to(self, request: web.Request) -> bool:
        # Decoding such a name would load tables for 50 ms, and no such name is served.
        if not request.host.isascii():
            return False
        try:
            host = request.url.host or ""
        except ValueError:
            return False
        if host.lower() in self._names:
            return True
        # Prometheus and load balancers use any name that their configuration gives to this machine.
        everywhere = request.path in FOR_MACHINES and not is_loopback(self._host)
        return everywhere or may_name(host, self._host)


def _refusing_expectations(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A handler that refuses an Expect header that is not ASCII, on which aiohttp would fail before middleware."""

    async def handle(request: web.BaseRequest) -> Any:
        if not request.headers.get("Expect", "").isascii():
            return web.Response(status=417, text="Expect must be ASCII\n", headers=HEADERS)
        return await handler(request)

    return handle


def _with_target(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """A factory that accepts CONNECT without a target, on which aiohttp would fail and never close the connection."""

    def make(message: Any, *rest: Any) -> web.BaseRequest:
        return factory(message if message.url is not None else message._replace(url=URL()), *rest)

    return make


async def _read_body(request: web.Request) -> None:
    """Reads the body before the handler runs. Raises HTTPRequestTimeout and HTTPRequestEntityTooLarge."""
    try:
        async with asyncio.timeout(BODY_S):
            await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"the body must come within {BODY_S:g} s\n") from error


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    # Browsers have to ask every time whether their copy of a file is still current.
    response.headers.setdefault("Cache-Control", "no-store" if request.path.startswith(API) else "no-cache")


def may_name(host: str, listen: str) -> bool:
    """Whether a request with the host name `host` can be meant for the server that listens on `listen`.

    The owner of a DNS name can let it mean any address. But an address, or a name without a dot, such as a container's,
    cannot be another site's. A server on loopback accepts only the names of loopback.
    """
    if is_loopback(listen):
        return is_loopback(host)
    return host.lower() == listen.lower() or "." not in host or ip_address(host) is not None
