"""HTTP requests made at random, on sockets of their own: mostly such as the live page, Prometheus and load balancers
make, and all that a client can get wrong before, in and behind a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from support.fuzz.mutations import TEXTS

PATHS = (
    *("/", "/metrics", "/health", "/ready", "/page/app.js", "/page/index.html", "/api/requests", "/api/explain"),
    *("/api/block/0", "/api/block/7", "/api/host-block/0", "/api/request?id=fuzz-1", "/api/stream"),
)
WILD_PATHS = (
    *("/page/../../server.py", "/page/%2e%2e/%2e%2e/etc/passwd", "//", "/%", "/%00", "/%ff%fe", "/api/block/-1", "*"),
    *("/api/block/99999999999", "/api/block/4294967296", "/api/request?id=" + "x" * 300, "/api/request?id=%ff", "/ä"),
    *("http://localhost/health", "http://evil.example/metrics", "/?" + "a=b&" * 2000, "/" + "x" * 9000, "", "/page/"),
)
METHODS = ("GET", "GET", "GET", "POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "TRACE", "get", "G\0T", "", "X" * 300)
HOSTS = ("127.0.0.1", "localhost", "[::1]", "localhost:1", "evil.example", "", "a b", "[", "127.0.0.1:x", "ä")
HEADERS = (
    *("Range: bytes=0-1", "Range: bytes=9-1", "Range: bytes=-", "If-None-Match: *", "Expect: 100-continue"),
    *("Expect: other", "Upgrade: websocket", "Connection: keep-alive, upgrade", "Transfer-Encoding: gzip, chunked"),
    *("Content-Type: \xff", "Content-Encoding: gzip", "Accept-Encoding: br;q=2, *", "Sec-Fetch-Site: cross-site"),
    *("Cookie: a=\x01; b", "no colon", ": no name", " folded", "X: " + "y" * 9000, "Content-Length: 5", "A\0: b"),
    *("If-Modified-Since: never", "Sec-WebSocket-Key: x", "Origin: null", "Content-Length: -1", "Content-Length: 1e3"),
)
# Answers of a port that serves. 500 never is, and 503 would say that it does not serve.
STATUSES = frozenset((100, 101, 200, 206, 304, 400, 403, 404, 405, 408, 413, 414, 416, 417, 429, 431, 501, 505))
_STATUS_LINE = re.compile(rb"HTTP/[0-9]\.[0-9] ([0-9]{3}) ")
HANG_S = 240.0


@dataclass(frozen=True)
class HttpRequest:
    """All that is written to one connection, in pieces with a pause behind each."""

    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    # Seconds until the client closes; None: it waits for the server to close.
    patience_s: float | None = None
    # A request that a server has to understand and answer, closing the connection behind it.
    whole: bool = False

    @property
    def size(self) -> int:
        """Bytes that are sent at most."""
        return sum(map(len, self.pieces))

    @property
    def count(self) -> int:
        """Messages."""
        return 1


def make_request(rng: random.Random) -> HttpRequest:
    """The request that these random numbers mean."""
    path = rng.choice(PATHS) if rng.random() < 0.8 else rng.choice(WILD_PATHS)
    explains = path == "/api/explain"
    method = ("POST" if explains else "GET") if rng.random() < 0.85 else rng.choice(METHODS)
    body = _body(rng) if explains or rng.random() < 0.05 else b""
    headers = [f"Host: {rng.choice(HOSTS) if rng.random() < 0.1 else '127.0.0.1'}"]
    wild = rng.random() < 0.3
    if wild:
        headers += rng.choices(HEADERS, k=rng.choice([1, 1, 2, 5]))
        headers += [f"X-{n}: y" for n in range(rng.choice([0, 0, 0, 150, 2000]))]
    version = "HTTP/1.1" if rng.random() < 0.95 else rng.choice(["HTTP/1.0", "HTTP/9.9", "http/1.1", "", "HTTP/1.1 x"])
    if body:
        headers += _framing(rng, body)
        if headers[-1].startswith("Transfer"):
            body = _chunked(rng, body)
    closes = path != "/api/stream" and rng.random() < 0.9
    if closes:
        headers.append("Connection: close")
    data = f"{method} {path} {version}\r\n".encode("utf-8", "surrogateescape")
    data += "".join(f"{line}\r\n" for line in headers).encode("latin-1", "replace") + b"\r\n" + body
    return _sent(rng, data, whole=closes and not wild)


def _sent(rng: random.Random, data: bytes, *, whole: bool) -> HttpRequest:
    """Mostly at once; else damaged, cut off, several at once or slowly."""
    fate = rng.random()
    if fate < 0.75:
        return HttpRequest((data,), patience_s=None if whole else 0.1, whole=whole)
    if fate < 0.8:
        return HttpRequest((rng.randbytes(rng.choice([1, 50, 3000])),), patience_s=0.05)
    if fate < 0.85:
        return HttpRequest((data[: rng.randrange(len(data))],), patience_s=rng.choice([0.0, 0.05]))
    if fate < 0.9:
        at = rng.randrange(len(data))
        return HttpRequest((data[:at] + rng.randbytes(1) + data[at + 1 :],), patience_s=0.05)
    if fate < 0.95:
        return HttpRequest((data * rng.choice([2, 20]),), patience_s=0.1)
    if fate < 0.999:
        at = rng.randrange(len(data))
        return HttpRequest((data[:at], data[at:]), pause_s=0.02, patience_s=0.1)
    # So slowly that the server gives up.
    return HttpRequest(tuple(data[at : at + 1] for at in range(40)), pause_s=0.5)


def _body(rng: random.Random) -> bytes:
    asked: Any = {"text": "word " * rng.choice([1, 30]), "namespace": rng.choice(["", "a"])}
    if rng.random() < 0.5:
        del asked["text"]
        asked["token_ids"] = [rng.randrange(4096) for _ in range(rng.choice([1, 40, 300]))]
    fate = rng.random()
    if fate < 0.2:
        wild: list[Any] = [None, -1, 1.5, 1e400, 10**30, True, [], {}, ["a"], [None], [2**32], *TEXTS]
        asked[rng.choice(["text", "token_ids", "namespace", "adapter", "other"])] = rng.choice(wild)
    body = json.dumps(asked).encode()
    if fate < 0.9:
        return body
    return rng.choice(
        (
            *(
                b"[" * 30_000,
                b'{"a":' * 20_000,
                b"{}",
                b"[]",
                b"nul",
                b"\xff\xfe{}",
                b'"\\ud800"',
                b'{"text": "\\udc00"}',
            ),
            *(body[:-3], body * 2, b" " * 140_000, b"9" * 100_000, b'{"token_ids": [' + b"1," * 60_000 + b"1]}"),
            b'{"text": "' + b"\xff" * 50 + b'"}',
        )
    )


def _framing(rng: random.Random, body: bytes) -> list[str]:
    """How the body's end is told, mostly truly."""
    fate = rng.random()
    if fate < 0.8:
        return [f"Content-Length: {len(body)}"]
    if fate < 0.9:
        return ["Transfer-Encoding: chunked"]
    return rng.choice(
        (
            ["Content-Length: 3"],
            [f"Content-Length: {len(body) + 10}"],
            [f"Content-Length: {2**40}"],
            [f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"],
            [f"Content-Length: {len(body)}", "Content-Length: 7"],
        )
    )


def _chunked(rng: random.Random, body: bytes) -> bytes:
    size = rng.choice([1000, len(body)])
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    made = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    if rng.random() < 0.8:
        return made
    return rng.choice(
        (b"zz\r\n" + made, b"-1\r\n" + made, b"f" * 40 + b"\r\n", made[:-7], b"1;" + b"e" * 9000 + b"\r\n")
    )


async def perform(address: str, request: HttpRequest) -> str:
    """Makes the request. "" when it was answered as it may be, else what is wrong with the answer."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        return f"no connection: {error}"
    received = bytearray()
    try:
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(HANG_S):
                for piece in request.pieces:
                    writer.write(piece)
                    await writer.drain()
                    if request.pause_s:
                        await asyncio.sleep(request.pause_s)
        try:
            async with asyncio.timeout(HANG_S if request.patience_s is None else request.patience_s):
                while piece := await reader.read(65536):
                    # The first bytes have the status; more of a stream is of no interest.
                    received += piece if len(received) < 65536 else b""
        except TimeoutError:
            if request.patience_s is None:
                return f"neither closed nor answered within {HANG_S:g} s"
        except ConnectionError:
            pass
    finally:
        writer.transport.abort()
    statuses = {int(found) for found in _STATUS_LINE.findall(bytes(received))}
    if request.whole and not statuses:
        return f"no answer but {bytes(received[:200])!r}"
    return f"status {sorted(statuses - STATUSES)}" if statuses - STATUSES else ""


def shown(request: HttpRequest) -> str:
    """All of a request, for a failure's report."""
    text = " | ".join(repr(piece[:4096]) for piece in request.pieces)
    return f"{text} of {request.size} bytes, patience {request.patience_s}"
