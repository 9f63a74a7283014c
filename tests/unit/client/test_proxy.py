"""The proxy of the environment: whose it is, and an error that names it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from pagekv.client import PageKVClient, Unreachable
from pagekv.client.proxy import proxy_variable


@pytest.mark.parametrize(
    ("target", "variables", "used"),
    [
        ("gpu-7:1", {}, ""),
        ("gpu-7:1", {"http_proxy": "http://p:3128"}, "http_proxy"),
        ("gpu-7:1", {"http_proxy": "http://p:3128", "grpc_proxy": "http://q:1", "https_proxy": ""}, "grpc_proxy"),
        ("gpu-7:1", {"http_proxy": "http://p:3128", "https_proxy": ""}, ""),
        ("gpu-7:1", {"http_proxy": "p:3128"}, ""),
        ("gpu-7:1", {"http_proxy": "socks5://p:3128"}, ""),
        ("gpu-7:1", {"http_proxy": "http://p:3128", "no_proxy": "gpu-7", "no_grpc_proxy": ""}, "http_proxy"),
        ("gpu-7:1", {"HTTP_PROXY": "http://p:3128", "all_proxy": "http://p:3128"}, ""),
        ("localhost:1", {"http_proxy": "http://p:3128"}, ""),
        ("gpu-7.example.org:1", {"http_proxy": "http://p:3128", "no_proxy": "a, .Example.org ,b"}, ""),
        ("gpu-7.example.org:1", {"http_proxy": "http://p:3128", "no_proxy": "*"}, "http_proxy"),
        ("gpu-7:1", {"http_proxy": "http://p:3128", "no_proxy": "gpu-7", "no_grpc_proxy": "gpu-8"}, "http_proxy"),
        ("192.0.2.7:1", {"http_proxy": "http://p:3128", "no_proxy": "192.0.2.0/24"}, ""),
        ("192.0.2.7:1", {"http_proxy": "http://p:3128", "no_proxy": "192.0.3.0/24,x/y"}, "http_proxy"),
        ("[2001:db8::1]:1", {"http_proxy": "http://p:3128", "no_proxy": "2001:db8::/32"}, ""),
    ],
)
def test_the_variable_of_a_proxy(
    target: str, variables: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable(target) == used


@pytest.mark.parametrize("proxy", ["127.0.0.1:9", "proxy.invalid:3128"])
def test_a_proxy_that_does_not_get_there_is_told(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:secret@{proxy}")
    with PageKVClient("gpu-7:50051") as client, pytest.raises(Unreachable) as caught:
        client.stats()
    assert "cannot reach PageKV at gpu-7:50051 through the proxy that the variable http_proxy" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("words", ["", "it speaks no HTTP\r\n"])
def test_a_proxy_that_closes_the_connection_is_told(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks like a manager that wants TLS, or another port than a manager's."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")

        def close() -> None:
            with suppress(OSError):
                while True:
                    with proxy.accept()[0] as connection:
                        connection.recv(4096)
                        connection.sendall(words.encode())

        threading.Thread(target=close, daemon=True).start()
        with PageKVClient("gpu-7:50051") as client, pytest.raises(Unreachable) as caught:
            client.stats()
        proxy.shutdown(socket.SHUT_RDWR)
    assert "at gpu-7:50051 through the proxy that the variable http_proxy names: " in str(caught.value)
