"""One GET of a key set: bounds in time and size, redirects, proxies."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from support.access.key_server import key_server
from support.clients.held_port import held_port

from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES
from pagekv.kvmanager.access.key_set_download import KeySetDownloadError, download_key_set

SHORT_S = 0.3
# Less than any of the faults takes.
LATE_S = 5.0


def test_the_body_comes_back_and_the_query_is_sent() -> None:
    with key_server(b"keys") as server:
        assert download_key_set(server.url) == b"keys"
        assert server.asked == ["/keys?v=1"]


def test_redirects_are_refused() -> None:
    with key_server(b"{}") as server, key_server(b"evil") as other:
        server.status, server.location = 302, other.url
        with pytest.raises(KeySetDownloadError, match=r"status 302 \(redirects are not followed\)"):
            download_key_set(server.url)
        assert other.asked == []


def test_a_status_other_than_200_is_refused() -> None:
    with key_server(b"{}") as server:
        server.status = 404
        with pytest.raises(KeySetDownloadError, match=r"status 404$"):
            download_key_set(server.url)


def test_what_a_server_says_cannot_command_a_terminal() -> None:
    with key_server(b"{}") as server:
        server.status = "\x1b[2J\x07"  # type: ignore[assignment]  # no number
        with pytest.raises(KeySetDownloadError) as caught:
            download_key_set(server.url)
    assert str(caught.value).isprintable()
    assert "[2J" in str(caught.value)


def test_a_huge_body_is_refused() -> None:
    with key_server(b" " * MAX_KEY_SET_BYTES) as server:
        assert len(download_key_set(server.url)) == MAX_KEY_SET_BYTES
        server.body += b" " * 2**22
        with pytest.raises(KeySetDownloadError, match="has more than 262144 bytes"):
            download_key_set(server.url)


@pytest.mark.parametrize("slow_headers", [False, True])
def test_a_server_that_sends_a_byte_now_and_then_is_left(slow_headers: bool) -> None:
    with key_server(b"x" * 1000) as server:
        server.pause_s, server.slow_headers = 0.05, slow_headers
        begun = time.monotonic()
        with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
            download_key_set(server.url, SHORT_S)
        assert time.monotonic() - begun < LATE_S


def test_a_server_that_says_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
            download_key_set(f"http://127.0.0.1:{silent.getsockname()[1]}/", SHORT_S)
        # TLS, too.
        with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
            download_key_set(f"https://127.0.0.1:{silent.getsockname()[1]}/", SHORT_S)


def test_nobody_there() -> None:
    with held_port() as port, pytest.raises(KeySetDownloadError, match="ConnectionRefusedError"):
        download_key_set(f"http://127.0.0.1:{port}/")


def test_a_server_without_a_trusted_certificate_is_refused() -> None:
    with key_server(b"keys") as server, pytest.raises(KeySetDownloadError, match="SSL"):
        download_key_set(server.url.replace("http:", "https:"))
    assert server.asked == []


def test_loopback_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with key_server(b"keys") as server, key_server(b"proxy") as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert download_key_set(server.url) == b"keys"
        with pytest.raises(KeySetDownloadError):
            download_key_set(server.url.replace("http:", "https:"))
        assert proxy.asked == []


def test_other_hosts_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with key_server() as proxy:
        proxy.status = 502
        _always_through_a_proxy(monkeypatch)
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{proxy.port}")
        with pytest.raises(KeySetDownloadError, match="502") as caught:
            download_key_set("https://login.invalid/keys")
        assert proxy.asked == ["login.invalid:443"]
        assert "secret" not in str(caught.value)


def test_a_proxy_that_sends_a_byte_now_and_then_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with key_server() as proxy:
        # Its answer would take ten seconds.
        proxy.pause_s, proxy.slow_headers, proxy.location = 0.05, True, "x" * 200
        _always_through_a_proxy(monkeypatch)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        begun = time.monotonic()
        with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
            download_key_set("https://login.invalid/keys", SHORT_S)
        assert time.monotonic() - begun < LATE_S


def test_a_handshake_that_sends_a_byte_now_and_then_is_left() -> None:
    """Behind the head of the longest record of TLS, in which the server's first message would be."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"\x16\x03\x03\x40\x00")
                while not ended.wait(0.05):
                    connection.sendall(b"\x02")

        dripping = threading.Thread(target=drip)
        dripping.start()
        begun = time.monotonic()
        try:
            with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
                download_key_set(f"https://127.0.0.1:{server.getsockname()[1]}/", SHORT_S)
            assert time.monotonic() - begun < LATE_S
        finally:
            ended.set()
            dripping.join()


def test_a_name_of_many_addresses_that_answer_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full, ExitStack() as waiting:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname())] * 20
        # Connections that nobody accepts: the system takes no further one.
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
        begun = time.monotonic()
        with pytest.raises(KeySetDownloadError, match=r"took longer than 0.3 s"):
            download_key_set("http://login.invalid/keys", SHORT_S)
        assert time.monotonic() - begun < LATE_S


def test_another_address_of_a_name_is_asked_where_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with key_server(b"keys") as server, held_port() as nobody:
        places = [("127.0.0.1", nobody), ("127.0.0.1", server.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
        assert download_key_set("http://login.invalid/keys") == b"keys"


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _always_through_a_proxy(monkeypatch)
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(KeySetDownloadError, match="https_proxy: must be an http URL"):
        download_key_set("https://login.invalid/keys")


def _always_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
