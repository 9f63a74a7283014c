"""One GET of a key set, bounded in time and size. Redirects are refused: the URL says where keys come from."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from urllib.parse import SplitResult, unquote, urlsplit

from pagekv.common.loopback import is_loopback
from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES

# Seconds for the download, without the lookup of the name, which the system bounds.
LIMIT_S = 5.0


class KeySetDownloadError(Exception):
    """The download failed; the message says why in one line."""


def download_key_set(url: str, limit_s: float = LIMIT_S) -> bytes:
    """The body of the answer. Blocks, so it has to run in a thread. Raises KeySetDownloadError."""
    deadline = time.monotonic() + limit_s
    parts = urlsplit(url)
    too_late = threading.Event()
    try:
        connection = _connection(parts, limit_s)
        try:
            connection.connect()
            # The connection's own timeout bounds only single reads, which a server passes by sending a byte now and
            # then.
            alarm = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (connection.sock, too_late))
            alarm.daemon = True
            alarm.start()
            try:
                body = _get(connection, parts)
            finally:
                alarm.cancel()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        is_late = too_late.is_set() or isinstance(error, TimeoutError)
        raise KeySetDownloadError(f"took longer than {limit_s:g} s" if is_late else _words(error)) from error
    if too_late.is_set():
        raise KeySetDownloadError(f"took longer than {limit_s:g} s")
    return body


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


def _cut(connected: socket.socket, too_late: threading.Event) -> None:
    too_late.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _words(error: Exception) -> str:
    """The error in one line, without characters from the server that a terminal would interpret."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "".join(each if each.isprintable() else "?" for each in text)
