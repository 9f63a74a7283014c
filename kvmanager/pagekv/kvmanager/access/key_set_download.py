"""One GET of a key set, bounded in time and size. Redirects are refused: the URL says where keys come from."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from pagekv.common.loopback import is_loopback
from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES

# Seconds for the download behind the lookup of the name, which the system bounds.
LIMIT_S = 5.0


class KeySetDownloadError(Exception):
    """The download failed; the message says why in one line."""


def download_key_set(url: str, limit_s: float = LIMIT_S) -> bytes:
    """The body of the answer. Blocks, so it has to run in a thread. Raises KeySetDownloadError."""
    parts = urlsplit(url)
    deadline = _Deadline(limit_s)
    try:
        with closing(deadline), closing(_connection(parts, limit_s)) as connection:
            # Called by `connect`, which then asks a proxy and makes the handshake of TLS.
            connection._create_connection = deadline.open  # type: ignore[attr-defined]  # the stubs lack it
            connection.connect()
            body = _get(connection, parts)
    except (OSError, http.client.HTTPException, ValueError) as error:
        is_late = deadline.is_over or isinstance(error, TimeoutError)
        raise KeySetDownloadError(f"took longer than {limit_s:g} s" if is_late else _words(error)) from error
    if deadline.is_over:
        raise KeySetDownloadError(f"took longer than {limit_s:g} s")
    return body


class _Deadline:
    """Bounds all that happens on one connection. The connection's own timeout bounds only single reads, which a server
    or a proxy passes by sending a byte now and then.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._alarm: threading.Timer | None = None
        # The alarm's own descriptor of the connection, because TLS takes that of the socket.
        self._connected: socket.socket | None = None
        self.is_over = False

    def open(self, address: tuple[str, int], *_: object) -> socket.socket:
        """A connection to a server, whose time begins now. Raises OSError."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        end = time.monotonic() + self._limit_s
        connected = _first(found, end)
        connected.settimeout(self._limit_s)
        self._connected = connected.dup()
        alarm = threading.Timer(max(0.0, end - time.monotonic()), self._cut, (self._connected,))
        alarm.daemon = True
        alarm.start()
        self._alarm = alarm
        return connected

    def _cut(self, connected: socket.socket) -> None:
        self.is_over = True
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm.join()
        if self._connected is not None:
            self._connected.close()


def _first(found: Sequence[tuple[Any, ...]], end: float) -> socket.socket:
    """A connection to the first of these addresses, as from `getaddrinfo`, that accepts one. Raises OSError."""
    refused: OSError | None = None
    for each in found:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        try:
            return _connect(each, left_s)
        except OSError as error:
            refused = error
    raise refused or OSError("the name has no address")


def _connect(found: tuple[Any, ...], limit_s: float) -> socket.socket:
    family, kind, protocol, _, address = found
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(limit_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _get(connection: http.client.HTTPConnection, parts: SplitResult) -> bytes:
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", path, headers={"Accept": "application/json", "User-Agent": "pagekv"})
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        redirected = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
        raise KeySetDownloadError(f"answered with status {answer.status}{redirected}")
    body = answer.read(MAX_KEY_SET_BYTES + 1)
    if len(body) > MAX_KEY_SET_BYTES:
        raise KeySetDownloadError(f"has more than {MAX_KEY_SET_BYTES} bytes")
    return body


def _connection(parts: SplitResult, limit_s: float) -> http.client.HTTPConnection:
    """A connection to the server; for https through the environment's proxy, unless the server is on loopback."""
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port or 80, timeout=limit_s)
    trusted = ssl.create_default_context()
    proxy = "" if is_loopback(host) or urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https")
    if not proxy:
        return http.client.HTTPSConnection(host, port or 443, timeout=limit_s, context=trusted)
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if through.scheme != "http" or not through.hostname:
        raise KeySetDownloadError("https_proxy: must be an http URL")
    tunnel = http.client.HTTPSConnection(through.hostname, through.port or 80, timeout=limit_s, context=trusted)
    login = f"{unquote(through.username or '')}:{unquote(through.password or '')}".encode()
    headers = {"Proxy-Authorization": f"Basic {base64.b64encode(login).decode()}"} if through.username else {}
    tunnel.set_tunnel(host, port or 443, headers)
    return tunnel


def _words(error: Exception) -> str:
    """The error in one line, without characters from the server that a terminal would interpret."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "".join(each if each.isprintable() else "?" for each in text)
