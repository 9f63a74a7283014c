"""The HTTP routes of the page: its files, its stream, and the details it asks for when somebody looks closer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from aiohttp import web

from pagekv.common.errors import InvalidRequest, NotFound, Overloaded, PageKVError, Unavailable
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_request_id
from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.observe.http_server import HEADERS
from pagekv.kvmanager.page.explain import explain
from pagekv.kvmanager.page.frame import request_rows
from pagekv.kvmanager.page.hub import PageHub, Viewer
from pagekv.kvmanager.page.inspector import block_detail, host_block_detail, request_detail

# Seconds that one message may take to be read before its reader counts as gone.
WRITE_TIMEOUT_S = 30.0
# Seconds without a message after which a reader is written a comment.
KEEP_ALIVE_S = 5.0
# Subclasses stand before their bases: the first match wins.
_STATUS: dict[type[PageKVError], int] = {InvalidRequest: 400, NotFound: 404, Overloaded: 429, Unavailable: 503}
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class Page:
    """The routes over one engine."""

    def __init__(self, engine: Engine, served_model: ServedModel, hub: PageHub, *, show_text: bool) -> None:
        """`show_text`: whether blocks are shown with their content."""
        self._engine = engine
        self._served_model = served_model
        self._hub = hub
        self._show_text = show_text

    def routes(self) -> list[web.AbstractRouteDef]:
        """To be served by `HttpServer`."""
        files = [_static(f"/page/{name}", name) for name in _names() if name != "index.html"]
        return [
            _static("/", "index.html"),
            *files,
            web.get("/api/stream", self._stream),
            web.get("/api/block/{block_id:[0-9]{1,10}}", _answered(self._block)),
            web.get("/api/host-block/{block_id:[0-9]{1,10}}", _answered(self._host_block)),
            web.get("/api/requests", _answered(self._requests)),
            web.get("/api/request", _answered(self._request)),
            web.post("/api/explain", _answered(self._explain)),
        ]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: a snapshot, then changes, each a JSON object. Another snapshot begins an epoch."""
        try:
            viewer = self._hub.add_viewer()
        except Overloaded as error:
            return _error(error)
        try:
            response = web.StreamResponse(
                headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            # The browser then knows that it is connected before there is an executor to tell of.
            await response.write(b"retry: 1000\n\n")
            while True:
                lines = await _next_lines(viewer)
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(lines)
        except (ConnectionError, TimeoutError):
            return response
        finally:
            self._hub.remove_viewer(viewer)

    async def _block(self, request: web.Request) -> dict[str, Any]:
        tokenizer = self._served_model.served().tokenizer if self._show_text else None
        block = int(request.match_info["block_id"])
        return block_detail(self._engine.queries.block_detail(block), tokenizer, with_tokens=self._show_text)

    async def _host_block(self, request: web.Request) -> dict[str, Any]:
        return host_block_detail(self._engine.queries.host_block(int(request.match_info["block_id"])))

    async def _requests(self, request: web.Request) -> dict[str, Any]:
        requests, live = request_rows(self._engine)
        return {"requests": requests, "live": live}

    async def _request(self, request: web.Request) -> dict[str, Any]:
        # Not part of the path: "." and ".." are ids, and mean something else in a path.
        request_id = request.query.get("id", "")
        check_request_id("id", request_id)
        return request_detail(request_id, self._engine.queries.block_tables(request_id))

    async def _explain(self, request: web.Request) -> dict[str, Any]:
        try:
            # As UTF-8, whatever the header says.
            asked = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("body", "must be JSON") from error
        return await explain(self._engine, self._served_model.served(), asked)


async def _next_lines(viewer: Viewer) -> bytes:
    """The next message, or a comment when there is none for a while: only writing shows that a reader has gone."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return f"data: {await viewer.next()}\n\n".encode()
    except TimeoutError:
        return b":\n\n"


def _answered(
    handler: Callable[[web.Request], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler with its answer, or its error, as JSON."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return _json(await handler(request), 200)
        except PageKVError as error:
            return _error(error)

    return answer


def _json(value: dict[str, Any], status: int) -> web.Response:
    headers = {"Cache-Control": "no-store"}
    return web.Response(text=json.dumps(value), content_type="application/json", status=status, headers=headers)


def _error(error: PageKVError) -> web.Response:
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    field = {"field": error.field} if isinstance(error, InvalidRequest) else {}
    return _json({"error": str(error), **field}, status)


def _names() -> list[str]:
    return sorted(file.name for file in resources.files("pagekv.kvmanager.page").joinpath("static").iterdir())


def _static(path: str, name: str) -> web.AbstractRouteDef:
    """A file of this package, read once. Browsers ask every time whether their copy is still the same."""
    body = resources.files("pagekv.kvmanager.page").joinpath("static", name).read_bytes()
    kind = _TYPES[name[name.rindex(".") :]]
    tag = hashlib.sha256(body).hexdigest()[:16]

    async def serve(request: web.Request) -> web.Response:
        headers = {"Cache-Control": "no-cache", "ETag": f'"{tag}"'}
        if request.if_none_match and any(known.value == tag for known in request.if_none_match):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return web.get(path, serve)
