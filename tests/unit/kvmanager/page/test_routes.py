"""The routes of the page: answers and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.browser.page_reader import PageReader
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, read, until
from support.event_loop import run_by

from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.observe.http_server import MAX_BODY_BYTES, HttpServer
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.page import routes
from pagekv.kvmanager.page.hub import MAX_VIEWERS, PageHub
from pagekv.kvmanager.page.routes import Page
from pagekv.kvmanager.server import Manager
from pagekv.v1 import operator_service_pb2 as pb

PROMPT = list(range(20))
# Longer than a test may take.
NEVER_S = 3600.0


class Site:
    """The page of an engine, and somebody who asks for it."""

    def __init__(
        self, engine: EngineLoop, url: str, session: aiohttp.ClientSession, hub: PageHub, bench: Bench | None = None
    ) -> None:
        self.engine, self.url, self.session, self.hub, self.bench = engine, url, session, hub, bench

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[None]:
        """A request that stands still after its first step was planned; released at the end."""
        assert self.bench is not None
        self.bench.step_s = NEVER_S
        stream = self.engine.submit(command(name, PROMPT, 140))
        await until(lambda: self.engine.statistics.stats().running_sequences == 1)
        yield
        self.engine.release(stream)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def explain(self, body: object) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(self.url + "/api/explain", data=data) as response:
            return response.status, await response.json()


Body = Callable[[Site], Awaitable[None]]


def served(body: Body, *, show_text: bool = False) -> None:
    """Runs `body` against an engine of 40 blocks of 4 tokens that has computed PROMPT."""

    async def run(engine: EngineLoop, bench: Bench) -> None:
        state = ServedModel(engine)
        assert engine.model is not None
        state.open(engine.model.model_fingerprint, None)
        hub = PageHub(engine, RequestMetrics())
        server = HttpServer("127.0.0.1:0", Page(engine, state, hub, show_text=show_text, reached={}).routes())
        port = await server.start()
        try:
            await read(engine.submit(command("first", PROMPT)))
            async with aiohttp.ClientSession() as session:
                await body(Site(engine, f"http://127.0.0.1:{port}", session, hub, bench))
            if bench.step_s:
                bench.step_s = 0.0
                assert bench.link is not None
                bench.link._finish()
                await until(lambda: not engine.statistics.stats().active_blocks)
        finally:
            await server.stop()

    engine_harness.run(run, num_device_blocks=40, block_ages=True)


@run_by(served)
async def test_the_page_and_all_it_loads_come_from_here(site: Site) -> None:
    async with site.session.get(site.url + "/") as response:
        page = await response.text()
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert "http://" not in page
    assert "https://" not in page
    for path, kind in [("/page/main.js", "/javascript"), ("/page/page.css", "text/css")]:
        async with site.session.get(site.url + path) as response:
            assert response.status == 200
            assert response.content_type.endswith(kind)
            assert response.headers["Cache-Control"] == "no-cache"
            known = {"If-None-Match": response.headers["ETag"]}
        async with site.session.get(site.url + path, headers=known) as response:
            assert response.status == 304
    async with site.session.get(site.url + "/page/../hub.py") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["listen"], "can read what this page shows and steer the manager."),
        (["http-listen", "listen"], "can read what this page shows and steer the manager."),
        (["http-listen", "kv-events-endpoint"], "can read what is served there."),
    ],
)
def test_the_warning_says_what_the_open_ports_allow(flags: list[str], end: str) -> None:
    assert f"{end}</p>" in routes._with_warning(routes.NO_WARNING, dict.fromkeys(flags, "0.0.0.0:1"))


@run_by(served)
async def test_a_page_that_other_machines_can_read_says_so(site: Site) -> None:
    hidden = '<p id="warning" role="note" hidden></p>'
    async with site.session.get(site.url + "/") as response:
        assert hidden in await response.text()
    state = ServedModel(site.engine)
    page = Page(site.engine, state, site.hub, show_text=False, reached={"listen": "<host>:1", "http-listen": "a:2"})
    server = HttpServer("127.0.0.1:0", page.routes())
    port = await server.start()
    try:
        async with site.session.get(f"http://127.0.0.1:{port}/") as response:
            text = await response.text()
    finally:
        await server.stop()
    assert hidden not in text
    assert '<p id="warning" role="note">Other machines can connect to this manager (--listen &lt;host&gt;:1, ' in text
    assert "--http-listen a:2)" in text


@run_by(served)
async def test_the_stream_begins_with_a_snapshot_and_ends_with_its_reader(site: Site) -> None:
    reader = PageReader()
    async with site.session.get(site.url + "/api/stream") as response:
        assert response.content_type == "text/event-stream"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
        while reader.messages < 2:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                reader.take(json.loads(line[6:]))
    assert (reader.snapshots, len(reader.device)) == (1, 40)
    await until(lambda: not any(task.get_name() == "live page" for task in asyncio.all_tasks()))


@run_by(served)
async def test_one_page_too_many_is_told_so(site: Site) -> None:
    viewers = [site.hub.add_viewer() for _ in range(MAX_VIEWERS)]
    status, answer = await site.get("/api/stream")
    assert (status, answer["error"]) == (429, "16 pages are open, the most possible; close one")
    for viewer in viewers:
        site.hub.remove_viewer(viewer)


@run_by(served)
async def test_a_block_is_answered_or_refused_by_name(site: Site) -> None:
    (first,) = site.engine.queries.lookup_prefix(PROMPT[:4], CacheIdentity()).block_ids
    status, answer = await site.get(f"/api/block/{first}")
    assert (status, answer["block_id"], "token_ids" in answer) == (200, first, False)
    status, answer = await site.get("/api/block/40")
    assert (status, answer["field"]) == (400, "block_id")
    assert answer["error"] == "block_id: must be from 0 to 39 (the pool), got 40"
    assert (await site.get("/api/host-block/0"))[0] == 400


@run_by(served, show_text=True)
async def test_a_block_tells_its_tokens_where_that_is_allowed(site: Site) -> None:
    (first,) = site.engine.queries.lookup_prefix(PROMPT[:4], CacheIdentity()).block_ids
    assert (await site.get(f"/api/block/{first}"))[1]["token_ids"] == PROMPT[:4]


@run_by(served)
async def test_a_live_request_tells_its_block_table_in_order(site: Site) -> None:
    async with site.running("live"):
        _, listed = await site.get("/api/requests")
        assert await site.get("/api/tenants") == (200, {"tenants": [], "total": 0})
        assert listed["requests"]["live"]["prompt_tokens"] == len(PROMPT)
        status, answer = await site.get("/api/request?id=live")
        assert status == 200
        (sequence,) = answer["sequences"]
        assert len(sequence["block_ids"]) == len(set(sequence["block_ids"])) >= 5
    # A page asks again and again until its stream tells that the request has ended.
    assert await site.get("/api/request?id=live") == (200, {"request_id": "live", "sequences": []})
    assert (await site.get("/api/request?id=%20"))[0] == 400


@pytest.mark.parametrize("name", [".", "..", "a:b"])
@run_by(served)
async def test_a_request_is_found_by_any_id_that_it_may_have(site: Site, *, name: str) -> None:
    async with site.running(name):
        status, answer = await site.get(f"/api/request?id={name}")
    assert (status, answer["request_id"], len(answer["sequences"])) == (200, name, 1)


@run_by(served)
async def test_a_prompt_is_explained_or_refused(site: Site) -> None:
    status, answer = await site.explain({"token_ids": PROMPT[:10]})
    assert (status, [block["outcome"] for block in answer["blocks"]]) == (200, ["hit", "hit", "partial_tail"])
    for asked, words in ((b"{", "must be JSON"), (b"[" * 60_000, "must be JSON"), ({}, "exactly one")):
        status, answer = await site.explain(asked)
        assert status == 400
        assert answer["error"].startswith(f"body: {words}")


@run_by(served)
async def test_a_prompt_that_is_too_long_to_be_sent_is_refused_in_words(site: Site) -> None:
    status, answer = await site.explain({"text": "x" * MAX_BODY_BYTES})
    assert status == 413
    assert str(MAX_BODY_BYTES) in answer["error"]


@pytest.mark.parametrize("charset", ["no-such", "utf-16", "base64"])
@run_by(served)
async def test_json_is_utf8_whatever_the_header_says(site: Site, *, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    for data, status in [(b'{"token_ids": [1]}', 200), (b"{", 400), (b'{"text": "\xff"}', 400)]:
        async with site.session.post(site.url + "/api/explain", data=data, headers=headers) as response:
            assert response.status == status


def test_nothing_of_the_page_is_loaded_from_elsewhere() -> None:
    static = Path(__file__).resolve().parents[4] / "kvmanager/pagekv/kvmanager/page/static"
    for file in static.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(line.split("// ")[0] for line in text.splitlines()), file.name


def test_the_page_is_there_with_the_http_port() -> None:
    async def body() -> int:
        manager = Manager(parse_config(["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"], {}), None)
        return len(manager._page_routes(RequestMetrics()))

    assert asyncio.run(body()) == 9


def served_without_executor(body: Body) -> None:
    async def run() -> None:
        engine = EngineLoop(engine_harness.config())
        state, hub = ServedModel(engine), PageHub(engine, RequestMetrics())
        server = HttpServer("127.0.0.1:0", Page(engine, state, hub, show_text=False, reached={}).routes())
        port = await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                await body(Site(engine, f"http://127.0.0.1:{port}", session, hub))
        finally:
            await server.stop()

    asyncio.run(run())


@run_by(served_without_executor)
async def test_no_executor_yet_is_no_failure(site: Site) -> None:
    for path in ("/api/block/0", "/api/requests"):
        assert await site.get(path) == (503, {"error": "no executor is attached yet"})
    assert (await site.explain({"token_ids": [1]}))[0] == 503
    site.hub.look()
    assert site.hub.frame is None


def test_pages_that_were_closed_before_there_was_anything_to_see_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.02)

    async def body(site: Site) -> None:
        for _ in range(MAX_VIEWERS):
            async with site.session.get(site.url + "/api/stream") as response:
                assert response.status == 200
                assert await response.content.readline() == b"retry: 1000\n"
                response.close()
        await until(lambda: not any(task.get_name() == "live page" for task in asyncio.all_tasks()))
        async with site.session.get(site.url + "/api/stream") as response:
            assert response.status == 200
            # It is open, and stays so.
            assert [await response.content.readline() for _ in range(5)] == [
                b"retry: 1000\n", b"\n", b"event: alive\n", b"data:\n", b"\n"
            ]  # fmt: skip  # several entries a line

    served_without_executor(body)


def test_the_tenants_with_most_blocks_come_first() -> None:
    answer = pb.ListTenantsResponse()
    for number in range(routes.MAX_TENANTS_SHOWN + 1):
        answer.tenants.add(name=f"t{number}", blocks=number, running_requests=2, output_tokens_total=7)
    shown = routes.tenant_rows(answer)
    assert (shown["total"], len(shown["tenants"])) == (routes.MAX_TENANTS_SHOWN + 1, routes.MAX_TENANTS_SHOWN)
    assert shown["tenants"][0] == {
        "name": "t100", "blocks": 100, "floor_blocks": 0, "running_requests": 2, "waiting_requests": 0,
        "prompt_tokens_total": 0, "cached_tokens_total": 0, "output_tokens_total": 7,
    }  # fmt: skip  # several entries a line
    assert shown["tenants"][-1]["name"] == "t1"
