"""Every reason against gRPC: an address that it cannot bind, and the words about it."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pagekv.common.cannot_listen import IN_USE, TAKEN, UNKNOWN, why_not_listen
from pagekv.common.server import SERVER_OPTIONS


def refused_by_grpc(listen: str) -> bool:
    """Whether gRPC cannot bind the address, with the options of a server."""
    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    try:
        server.add_insecure_port(listen)
    except RuntimeError:
        return True
    finally:
        server.stop(None)
    return False


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")),
    ],
)
def test_a_taken_port(host: str) -> None:
    is_six = ":" in host
    with socket.create_server((host, 0), family=socket.AF_INET6 if is_six else socket.AF_INET) as taken:
        listen = f"{f'[{host}]' if is_six else host}:{taken.getsockname()[1]}"
        assert refused_by_grpc(listen)
        assert why_not_listen(listen) == IN_USE


def test_an_address_of_another_machine() -> None:
    # Of a network that is for documentation alone.
    assert refused_by_grpc("203.0.113.7:50052")
    assert why_not_listen("203.0.113.7:50052") == "this machine does not have that address"


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "a" * 64])
def test_a_name_without_an_address(name: str) -> None:
    assert why_not_listen(f"{name}:50052") == "no address is found for this name"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/socket", "No such file or directory"),
        ("s" * 200, "AF_UNIX path too long"),
        ("file", TAKEN),
    ],
)
def test_a_socket_that_cannot_be_made(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").write_text("kept")
    listen = f"unix:{tmp_path / path}"
    assert refused_by_grpc(listen)
    assert why_not_listen(listen) == words
    assert (tmp_path / "file").read_text() == "kept"


def test_an_address_that_has_become_free_is_left_free(tmp_path: Path) -> None:
    assert why_not_listen(f"unix:{tmp_path / 'socket'}") == UNKNOWN
    assert os.listdir(tmp_path) == []
