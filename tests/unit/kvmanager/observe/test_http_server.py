"""The HTTP port: requests that are answered, and a taken port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from support.event_loop import in_event_loop, run_by

from pagekv.kvmanager.observe import http_server
from pagekv.kvmanager.observe.http_server import HEADERS, MAX_BODY_BYTES, HttpServer, may_name


async def hello(request: web.Request) -> web.Response:
    return web.Response(text=f"{len(await request.read())}")


@asynccontextmanager
async def served(
    listen: str = "127.0.0.1:0", names: tuple[str, ...] = ()
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    routes = [web.get("/", hello), web.post("/", hello), web.get("/metrics", hello), web.post("/api/x", hello)]
    server = HttpServer(listen, routes, names)
    port = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}/"
    finally:
        await server.stop()


Check = Callable[[aiohttp.ClientSession, str], Coroutine[None, None, None]]


def run(check: Check, listen: str = "127.0.0.1:0", names: tuple[str, ...] = ()) -> None:
    async def body() -> None:
        async with served(listen, names) as (session, url):
            await check(session, url)

    asyncio.run(body())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:9", "LOCALHOST:1"])
@run_by(run)
async def test_names_of_this_machine_are_answered(session: aiohttp.ClientSession, url: str, *, host: str) -> None:
    async with session.get(url, headers={"Host": host}) as response:
        assert (response.status, await response.text()) == (200, "0")
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example:80"])
@run_by(run)
async def test_another_name_for_this_machine_is_refused(session: aiohttp.ClientSession, url: str, *, host: str) -> None:
    """DNS rebinding: a page of evil.example whose name has come to mean 127.0.0.1."""
    async with session.get(url, headers={"Host": host}) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("listen", "names", "path", "status"),
    [
        ("0.0.0.0:0", (), "", 403),
        ("0.0.0.0:0", ("gpu1.example",), "", 200),
        ("0.0.0.0:0", ("gpu2.example",), "", 403),
        ("127.0.0.1:0", ("gpu1.example",), "", 200),
        # A Prometheus asks so.
        ("0.0.0.0:0", (), "metrics", 200),
        # Nobody but a browser that was led astray does.
        ("127.0.0.1:0", (), "metrics", 403),
        ("127.0.0.1:0", ("gpu1.example",), "metrics", 200),
    ],
)
def test_a_name_with_dots_is_answered_where_it_was_named(
    listen: str, names: tuple[str, ...], path: str, status: int
) -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url + path, headers={"Host": "GPU1.example:9400"}) as response:
            assert response.status == status
            assert status == 200 or "--http-names" in await response.text()

    run(check, listen, names)


def test_metrics_are_not_for_other_sites_pages() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        headers = {"Host": "gpu1.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        async with session.get(url + "metrics", headers=headers) as response:
            assert response.status == 403

    run(check, "0.0.0.0:0")


@pytest.mark.parametrize("host", ["a:b", ":", "evil.example.", "ä"])
@run_by(run)
async def test_what_is_no_name_is_refused(session: aiohttp.ClientSession, url: str, *, host: str) -> None:
    async with session.get(url, headers={"Host": host}) as response:
        assert response.status in (400, 403)


@run_by(run)
async def test_requests_of_other_sites_pages_are_refused_and_links_to_here_are_not(
    session: aiohttp.ClientSession, url: str
) -> None:
    for mode, status in [("cors", 403), ("no-cors", 403), ("navigate", 200)]:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        async with session.get(url, headers=headers) as response:
            assert response.status == status


@run_by(run)
async def test_a_body_that_is_too_large_is_refused(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(url, data=b"x" * (MAX_BODY_BYTES + 1)) as response:
        assert response.status == 413
    async with session.post(url, data=b"x" * 100) as response:
        assert await response.text() == "100"


@run_by(run)
async def test_refusals_carry_what_answers_do_and_are_json_where_answers_are(
    session: aiohttp.ClientSession, url: str
) -> None:
    too_long = b"x" * (MAX_BODY_BYTES + 1)
    for method, path, data, host, status in [
        ("GET", "nothing", None, "localhost", 404),
        ("GET", "", None, "evil.example", 403),
        ("PUT", "", None, "localhost", 405),
        ("POST", "", too_long, "localhost", 413),
        ("GET", "api/nothing", None, "localhost", 404),
        ("POST", "api/x", None, "evil.example", 403),
        ("GET", "api/x", None, "localhost", 405),
        ("POST", "api/x", too_long, "localhost", 413),
    ]:
        async with session.request(method, url + path, data=data, headers={"Host": host}) as response:
            assert response.status == status
            assert HEADERS.items() <= response.headers.items()
            assert ("Allow" in response.headers) == (status == 405)
            if path.startswith("api/"):
                assert list(await response.json()) == ["error"]
            else:
                assert response.content_type == "text/plain"


def connect(url: str, says: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").strip("/").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(says)
    connection.setblocking(False)
    return connection


async def answer(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.get_running_loop().sock_recv(connection, 4096):
            read += more
    return read


@pytest.mark.parametrize(
    ("limit", "says", "answered"),
    [
        ("HEADERS_S", b"", b""),
        ("HEADERS_S", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b""),
        ("HEADERS_S", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200 OK"),
        # aiohttp waits another ten seconds for what is left of the body.
        pytest.param(
            "BODY_S",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nslow",
            b"HTTP/1.1 408 ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_connections_that_are_slow_or_idle_are_closed(
    limit: str, says: bytes, answered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADERS_S", "BODY_S"):
        monkeypatch.setattr(http_server, name, 0.3 if name == limit else 3600.0)
    if limit == "BODY_S":
        says = says.replace(b"Host", b"Connection: close\r\nHost")

    async def check(session: aiohttp.ClientSession, url: str) -> None:
        with connect(url, says) as connection:
            read = await answer(connection)
        assert read.startswith(answered)
        assert bool(read) == bool(answered)

    run(check)


GZIP = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: gzip\r\n"


@pytest.mark.parametrize(
    ("says", "answered"),
    [
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b" 400 "),
        (b"GET /\xe4 HTTP/1.1\r\n\r\n", b" 400 "),
        (b"\0" * 9000, b" 400 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: \xff\r\nConnection: close\r\n\r\n", b" 417 "),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: 100-conti\xf5ue\r\nConnection: close\r\n\r\n", b" 417 "),
        (b"CONNECT  \r\nHost: localhost\r\nConnection: close\r\n\r\n", b" 404 "),
        (GZIP + b"Content-Length: 3\r\n\r\nabc", b" 200 "),  # no gzip; answered with its length
        (GZIP + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b" 400 "),
    ],
)
def test_a_request_that_is_none_is_refused_and_leaves_nothing_in_the_log(
    says: bytes, answered: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        with connect(url, says) as connection:
            assert answered in (await answer(connection)).partition(b"\r\n")[0]

    run(check)
    assert caplog.text == ""


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
def test_a_client_that_goes_before_its_body_leaves_nothing_in_the_log(
    more: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        for _ in range(20):
            with connect(
                url, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + more + b"\r\nab"
            ) as gone:
                # Closed with a reset, which is seen sooner than an end.
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with session.get(url) as response:
            assert response.status == 200

    run(check)
    assert caplog.text == ""


def test_an_error_of_a_handler_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(request: web.Request) -> web.Response:
        raise KeyError("a bug")

    async def main() -> None:
        server = HttpServer("127.0.0.1:0", [web.get("/", breaks)])
        url = f"http://127.0.0.1:{await server.start()}/"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 500
        await server.stop()

    asyncio.run(main())
    assert "KeyError: 'a bug'" in caplog.text


@in_event_loop
async def test_a_connection_that_takes_nothing_of_an_answer_has_a_time_limit() -> None:
    """The kernel keeps it, 30 seconds."""

    async def limit(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        return web.Response(text=str(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))

    server = HttpServer("127.0.0.1:0", [web.get("/", limit)])
    url = f"http://127.0.0.1:{await server.start()}/"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert await response.text() == "30000"
    await server.stop()


def newcomers_are_answered_beside_slow_ones() -> None:
    """Forty connections that say nothing, at a server that takes eight."""

    async def check(session: aiohttp.ClientSession, url: str) -> None:
        with contextlib.ExitStack() as slow:
            first = slow.enter_context(connect(url))
            for _ in range(40):
                slow.enter_context(connect(url, b"GET / HTTP/1.1\r\n"))
                async with session.get(url, headers={"Connection": "close"}) as response:
                    assert response.status == 200
            assert await answer(first) == b""

    run(check)


def test_the_longest_idle_make_room_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    newcomers_are_answered_beside_slow_ones()


def test_a_process_with_few_descriptors_keeps_most_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    # Else the oldest would end by itself.
    monkeypatch.setattr(http_server, "HEADERS_S", 3600.0)
    newcomers_are_answered_beside_slow_ones()


@in_event_loop
async def test_a_port_that_is_taken_is_an_error() -> None:
    async with served() as (_, url):
        with pytest.raises(OSError, match="address"):
            await HttpServer(url.removeprefix("http://").strip("/"), []).start()


@pytest.mark.parametrize(
    ("host", "listen", "expected"),
    [
        ("manager", "0.0.0.0", True),  # a container's name
        ("192.168.1.5", "0.0.0.0", True),
        ("::1", "::", True),
        ("gpu1.example", "0.0.0.0", False),  # it could come to mean this server
        ("gpu1.example", "gpu1.example", True),
        ("manager", "127.0.0.1", False),
        ("localhost", "127.0.0.1", True),
    ],
)
def test_no_name_that_could_be_another_sites_is_answered(host: str, listen: str, expected: bool) -> None:
    assert may_name(host, listen) is expected
