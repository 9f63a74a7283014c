"""The HTTP routes of the page: its files, its stream, and details of single blocks and requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from aiohttp import web

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import check_request_id
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import BlockDetail
from pagekv.kvmanager.page.explain import explain
from pagekv.kvmanager.page.hub import PageHub, Viewer, request_rows, state_name
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import operator_service_pb2 as pb

# Seconds that a viewer may take to read a message before it counts as gone.
WRITE_TIMEOUT_S = 30.0
# Seconds without a message after which the page is told that the manager is there; stream.js waits for three of them.
KEEP_ALIVE_S = 5.0
STATIC = Path(__file__).with_name("static")
# The place for a warning in index.html.
NO_WARNING = '<p id="warning" role="note" hidden></p>'
# Most tenants that are shown, and their fields.
MAX_TENANTS_SHOWN = 100
_TENANT = (
    *("name", "blocks", "floor_blocks", "running_requests", "waiting_requests"),
    *("prompt_tokens_total", "cached_tokens_total", "output_tokens_total"),
)
# Fields of BlockInfo and of BlockDetail that are shown for a device block.
_BLOCK = ("block_id", "ref_count", "pins", "block_hash", "parent_hash")
_DETAIL = ("cached_s", "chain", "chain_complete", "requests")


class Page:
    """The routes over one engine."""

    def __init__(
        self,
        engine: EngineLoop,
        served_model: ServedModel,
        hub: PageHub,
        *,
        show_text: bool,
        reached: Mapping[str, str],
    ) -> None:
        """`show_text`: whether blocks are shown with their content. `reached`: addresses at which other machines can
        connect, by the names of their flags; the page warns of them.
        """
        self._index_page = _with_warning((STATIC / "index.html").read_text(encoding="utf-8"), reached)
        self._engine = engine
        self._served_model = served_model
        self._hub = hub
        self._show_text = show_text

    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/", self._index),
            web.static("/page", STATIC),
            web.get("/api/stream", self._stream),
            web.get("/api/block/{block_id:[0-9]{1,10}}", self._block),
            web.get("/api/host-block/{block_id:[0-9]{1,10}}", self._host_block),
            web.get("/api/requests", self._requests),
            web.get("/api/request", self._request),
            web.get("/api/tenants", self._tenants),
            web.post("/api/explain", self._explain),
        ]

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(text=self._index_page, content_type="text/html")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, each a JSON object: a snapshot, then changes. Each epoch begins with another snapshot."""
        viewer = self._hub.add_viewer()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            # Tells the browser that it is connected, even if there is no frame yet for lack of an executor.
            await response.write(b"retry: 1000\n\n")
            while True:
                lines = await _next_lines(viewer)
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(lines)
        except (ConnectionError, TimeoutError):
            return response
        finally:
            self._hub.remove_viewer(viewer)

    async def _block(self, request: web.Request) -> web.Response:
        tokenizer = self._served_model.served().tokenizer if self._show_text else None
        found = self._engine.snapshots.block_detail(int(request.match_info["block_id"]))
        return web.json_response(block_detail(found, tokenizer, with_tokens=self._show_text))

    async def _host_block(self, request: web.Request) -> web.Response:
        block = self._engine.snapshots.host_block(int(request.match_info["block_id"]))
        return web.json_response(
            {"block_id": block.block_id, "ref_count": block.ref_count, "block_hash": block.block_hash}
        )

    async def _requests(self, request: web.Request) -> web.Response:
        requests, live = request_rows(self._engine)
        return web.json_response({"requests": requests, "live": live})

    async def _request(self, request: web.Request) -> web.Response:
        # The id is not part of the path, because "." and ".." are valid ids.
        request_id = request.query.get("id", "")
        check_request_id("id", request_id)
        # A request may end while its blocks are shown, so one that is not live is no error.
        found = await self._engine.snapshots.block_tables(request_id) or pb.GetBlockTableResponse()
        return web.json_response({"request_id": request_id, "sequences": list(map(sequence_detail, found.sequences))})

    async def _tenants(self, request: web.Request) -> web.Response:
        return web.json_response(tenant_rows(await self._engine.snapshots.list_tenants()))

    async def _explain(self, request: web.Request) -> web.Response:
        try:
            # Read as UTF-8, whatever the header says.
            asked = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("body", "must be JSON") from error
        await asyncio.sleep(0)  # a body at its bound takes two milliseconds to parse
        return web.json_response(await explain(self._engine, self._served_model.served(), asked))


def _with_warning(page: str, reached: Mapping[str, str]) -> str:
    """The page, with a warning if other machines can connect."""
    if not reached:
        return page
    where = ", ".join(f"--{name} {address}" for name, address in reached.items())
    # Only the gRPC port lets callers change anything (SECURITY.md).
    most = "read what this page shows and steer the manager" if "listen" in reached else "read what is served there"
    words = (
        f"Other machines can connect to this manager ({where}). There is no TLS and no login: everybody who reaches it "
        f"can {most}."
    )
    return page.replace(NO_WARNING, f'<p id="warning" role="note">{escape(words)}</p>')


async def _next_lines(viewer: Viewer) -> bytes:
    """The next message or, after KEEP_ALIVE_S, an event "alive": only writing shows that a viewer has gone, and only
    what comes shows a viewer that the manager has not.
    """
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return f"data: {await viewer.next()}\n\n".encode()
    except TimeoutError:
        return b"event: alive\ndata:\n\n"


def block_detail(detail: BlockDetail, tokenizer: Tokenizer | None, *, with_tokens: bool) -> dict[str, Any]:
    """A device block. `with_tokens`: with its token ids and, if there is a tokenizer, its text."""
    block, tokens = detail.block, detail.token_ids
    shown: dict[str, Any] = {name: getattr(block, name) for name in _BLOCK}
    shown |= {name: getattr(detail, name) for name in _DETAIL}
    if with_tokens and tokens is not None:
        shown |= {"token_ids": tokens, "text": tokenizer.decode(tokens) if tokenizer is not None else None}
    return shown


def tenant_rows(answer: pb.ListTenantsResponse) -> dict[str, Any]:
    """The tenants with most blocks, and the number of all tenants."""
    most = sorted(answer.tenants, key=lambda tenant: -tenant.blocks)[:MAX_TENANTS_SHOWN]
    rows = [{name: getattr(tenant, name) for name in _TENANT} for tenant in most]
    return {"tenants": rows, "total": len(answer.tenants)}


def sequence_detail(table: pb.SequenceBlocks) -> dict[str, Any]:
    return {
        "index": table.index,
        "state": state_name(table.state),
        "tokens": table.num_tokens,
        "computed": table.computed_tokens,
        "block_ids": list(table.block_ids),
    }
