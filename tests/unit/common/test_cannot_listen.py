"""Every reason against gRPC: an address that it cannot bind, and the words about it."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.event_loop import in_event_loop

from pagekv.common.cannot_listen import IN_USE, TAKEN, UNKNOWN, is_served, why_not_listen
from pagekv.common.probe import check
from pagekv.common.server import SERVER_OPTIONS, GrpcServer


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


def test_a_socket_at_which_a_process_listens_is_served_and_one_left_behind_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for listen in (f"unix:{path}", f"unix://{path}"):
        assert not is_served(listen)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen(0)
            # Nobody accepts, so the queue of connections soon is full.
            assert all(is_served(listen) for _ in range(5))
        assert path.is_socket()
        assert not is_served(listen)
        path.unlink()
    assert not is_served("127.0.0.1:1")


@in_event_loop
async def test_a_server_does_not_take_the_socket_of_another() -> None:
    """gRPC would, and the end of either would then remove the socket of the other."""
    with tempfile.TemporaryDirectory() as short:
        first, second = (GrpcServer(f"unix:{short}/server", [], reflection=False) for _ in range(2))
        await first.start()
        first.set_serving(True)
        with pytest.raises(OSError, match=f"^cannot listen on unix:{short}/server: {IN_USE}$"):
            await second.start()
        await second.stop(0)
        assert await asyncio.to_thread(check, f"unix:{short}/server") == "SERVING"
        await first.stop(0)
