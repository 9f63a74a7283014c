"""Connections of the HTTP port: their number, from the moment that they are accepted, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.clients.certificates import Authority
from support.event_loop import until

from pagekv.kvmanager.observe import http_listener, http_server
from pagekv.kvmanager.observe.http_listener import HttpListener
from pagekv.kvmanager.observe.http_server import HttpServer

MOST = 8

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in an event loop of each kind, for a minute at most."""
    make = pytest.importorskip(request.param, reason="pip install 'pagekv[manager]'").new_event_loop

    def in_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await main()

        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(bounded())

    return in_loop


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and of its clients."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    pair = authority.pair("manager")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    return tls, ssl.create_default_context(cafile=authority.ca)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection ends by itself, and few fill the port."""
    monkeypatch.setattr(http_server, "HEADERS_S", 3600.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", MOST)


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.setblocking(False)
    return connection


async def answer(connection: socket.socket) -> bytes:
    """The next bytes; b"" when the other side has closed."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(connection, 4096)
    return b""


def sockets() -> set[str]:
    """The sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith("socket:")}


def test_those_that_say_nothing_before_a_handshake_make_room(
    run: Run, secured: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    tls, trusting = secured

    async def main() -> None:
        server = HttpServer("127.0.0.1:0", [web.get("/", hello)], tls=tls)
        port = await server.start()
        before = sockets()
        async with aiohttp.ClientSession() as session:
            with contextlib.ExitStack() as silent:
                connections = [silent.enter_context(connect(port)) for _ in range(5 * MOST)]
                for oldest in connections[:-MOST]:
                    assert await answer(oldest) == b""
                await until(lambda: len(sockets() - before) == 6 * MOST)
                async with session.get(f"https://127.0.0.1:{port}/", ssl=trusting) as response:
                    assert await response.text() == "hello"
                assert await answer(connections[-MOST]) == b""
                # One that speaks no TLS is closed by itself.
                connections[-1].send(b"GET / HTTP/1.1\r\n\r\n")
                while await answer(connections[-1]):
                    pass
        await server.stop()
        await until(lambda: not sockets() - before)

    run(main)


@pytest.mark.parametrize("encrypted", [False, True])
def test_where_all_are_being_answered_a_newcomer_is_closed(
    run: Run, secured: tuple[ssl.SSLContext, ssl.SSLContext], encrypted: bool
) -> None:
    """Before its handshake."""
    tls, trusting = secured if encrypted else (None, None)
    begun, over = asyncio.Semaphore(0), asyncio.Event()

    async def streams(request: web.Request) -> web.Response:
        begun.release()
        await over.wait()
        return web.Response(text="over")

    async def main() -> None:
        server = HttpServer("127.0.0.1:0", [web.get("/", streams)], tls=tls)
        port = await server.start()
        async with aiohttp.ClientSession() as session:

            async def get() -> str:
                url = f"{'https' if encrypted else 'http'}://127.0.0.1:{port}/"
                async with session.get(url, ssl=trusting or True) as response:
                    return await response.text()

            answers = [asyncio.create_task(get()) for _ in range(MOST)]
            for _ in answers:
                await begun.acquire()
            for _ in range(3):
                with connect(port) as newcomer:
                    assert await answer(newcomer) == b""
            over.set()
            assert await asyncio.gather(*answers) == ["over"] * MOST
        await server.stop()

    run(main)


def test_the_end_waits_for_no_handshake(run: Run, secured: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        before = sockets()
        server = HttpServer("127.0.0.1:0", [web.get("/", hello)], tls=secured[0])
        port = await server.start()
        listening = sockets()
        with contextlib.ExitStack() as silent:
            connections = [silent.enter_context(connect(port)) for _ in range(3)]
            await until(lambda: len(sockets() - listening) == 6)
            await server.stop()
            for each in connections:
                assert await answer(each) == b""
            with pytest.raises(ConnectionRefusedError):
                connect(port)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await until(lambda: not sockets() - before)
        await server.stop()

    run(main)


def test_without_a_descriptor_connections_wait_and_the_loop_does_not_spin(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0
    accept = HttpListener._accept

    def counted(self: HttpListener, listening: socket.socket) -> None:
        nonlocal tries
        tries += 1
        accept(self, listening)

    monkeypatch.setattr(HttpListener, "_accept", counted)
    monkeypatch.setattr(http_listener, "PAUSE_S", 0.05)

    async def main() -> None:
        server = HttpServer("127.0.0.1:0", [web.get("/", hello)])
        port = await server.start()
        with socket.socket() as client, few_descriptors():
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            begun = time.monotonic()
            await until(lambda: tries >= 4)
            assert tries <= 2 + (time.monotonic() - begun) / http_listener.PAUSE_S
        with connect(port) as client:
            client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        await server.stop()

    run(main)
    assert [record.getMessage() for record in caplog.records] == [
        "the HTTP port accepts nothing for now: Too many open files"
    ]


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """Without one that is free."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def test_a_name_of_two_addresses_is_served_at_both_or_at_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        before = sockets()
        with socket.create_server(("127.0.0.2", 0)) as taken:
            port = taken.getsockname()[1]
            places = [("127.0.0.1", port), ("127.0.0.2", port)]

            async def both(*_: object, **__: object) -> list[Any]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

            monkeypatch.setattr(type(loop), "getaddrinfo", both, raising=False)
            server = HttpServer(f"localhost:{port}", [web.get("/", hello)])
            with pytest.raises(OSError, match="in use"):
                await server.start()
        await server.stop()
        assert not sockets() - before

    run(main)


def test_addresses_of_a_family_that_the_system_lacks_are_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ::1 of localhost, without IPv6."""

    async def main() -> None:
        async def both(*_: object, **__: object) -> list[Any]:
            unknown = (socket.AF_DECnet, socket.SOCK_STREAM, 6, "", ("::1", 0))
            return [unknown, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

        monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", both, raising=False)
        server = HttpServer("localhost:0", [web.get("/", hello)])
        with connect(await server.start()) as client:
            client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        await server.stop()

    run(main)
