"""Parts that can watch an engine, each as `bench_observers.py` measures it; to add one is to write another `part`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pagekv.common.server import GrpcServer
from pagekv.kvmanager.access.calls import GATEWAY_SERVICE
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.gateway.service import VllmEngine
from pagekv.kvmanager.observe.exporters import Exporters
from pagekv.kvmanager.observe.flags import ObserveConfig
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.observe.tracing import Tracing, otlp_processor
from pagekv.kvmanager.page.hub import PageHub

# Is given an engine before that is attached; adds its observers and starts what it needs.
Part = Callable[[EngineLoop], AbstractAsyncContextManager[None]]
PARTS: dict[str, Part] = {}


def part(name: str) -> Callable[[Callable[[EngineLoop], AsyncIterator[None]]], None]:
    """Registers an async generator that sets a part up, yields while it is measured, and ends it."""

    def register(body: Callable[[EngineLoop], AsyncIterator[None]]) -> None:
        PARTS[name] = asynccontextmanager(body)

    return register


@part("metrics")
async def metrics(engine: EngineLoop) -> AsyncIterator[None]:
    engine.observers.add(RequestMetrics())
    yield


@part("spans")
async def spans(engine: EngineLoop) -> AsyncIterator[None]:
    """To a collector of this process that takes everything, in a thread."""
    with collector() as port:
        tracing = Tracing(otlp_processor(f"http://127.0.0.1:{port}/v1/traces"))
        engine.observers.add(tracing)
        yield
        await tracing.close()


SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""


@part("kv-events")
async def kv_events(engine: EngineLoop) -> AsyncIterator[None]:
    """With a subscriber that takes everything, in a process of its own, and replays kept."""
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/events"
        observe = ObserveConfig(
            kv_events=True, kv_events_endpoint=endpoint, kv_events_replay_endpoint=f"{endpoint}-again"
        )
        async with _exporters(engine, observe):
            subscriber = await asyncio.create_subprocess_exec(sys.executable, "-c", SUBSCRIBER, endpoint)
            await asyncio.sleep(0.5)
            yield
            subscriber.kill()
            await subscriber.wait()


@part("record")
async def record(engine: EngineLoop) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        async with _exporters(engine, ObserveConfig(record=f"{directory}/trace")):
            yield


@part("record-steps")
async def record_steps(engine: EngineLoop) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        async with _exporters(engine, ObserveConfig(record_steps=f"{directory}/steps")):
            yield


@part("page")
async def page(engine: EngineLoop) -> AsyncIterator[None]:
    """Open once, by somebody who reads whatever comes. When nobody looks, blocks have an age all the same."""
    hub = PageHub(engine, RequestMetrics())
    engine.observers.add(hub.feed)
    viewer = hub.add_viewer()

    async def read() -> None:
        while True:
            await viewer.next()

    reader = asyncio.create_task(read())
    yield
    reader.cancel()
    hub.remove_viewer(viewer)


@asynccontextmanager
async def _exporters(engine: EngineLoop, observe: ObserveConfig) -> AsyncIterator[None]:
    exporters = Exporters(observe, engine._config)
    exporters.open(engine)
    yield
    await exporters.close()


GATEWAY_METHOD = f"/{GATEWAY_SERVICE}/SubscribeKvEvents"
# Does not decode: it would, on a machine of few cores, slow down what is measured here.
GATEWAY = """
import contextlib, sys, grpc
# The server ends before its subscribers know.
with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(sys.argv[1]) as channel:
    for batch in channel.unary_stream(sys.argv[2])(b""):
        pass
"""


@part("gateway")
async def gateway(engine: EngineLoop) -> AsyncIterator[None]:
    """The events that a gateway subscribes to, with a subscriber that takes everything, in a process of its own."""
    server = GrpcServer("127.0.0.1:0", [GATEWAY_SERVICE])
    VllmEngine(engine, ServedModel(engine), lambda: True).add_to(server.server)
    port = await server.start()

    async def subscribe() -> asyncio.subprocess.Process:
        await engine.wait_ready()
        return await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, f"127.0.0.1:{port}", GATEWAY_METHOD)

    subscribing = asyncio.create_task(subscribe())
    yield
    subscriber = await subscribing
    subscriber.kill()
    await subscriber.wait()
    await server.stop(0)


class _TakeAll(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[int]:
    """The port of an HTTP server that answers every POST with 200."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _TakeAll)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
