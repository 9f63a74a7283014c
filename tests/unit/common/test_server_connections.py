"""Connections to a server: a cap, time limits for those that say nothing, and descriptors that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.stack import environment

from pagekv.common import server
from pagekv.common.port_file import read_port_file
from pagekv.common.server import GrpcServer, connection_limit

# A client that speaks HTTP/2 and calls nothing: preface and empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
NEVER_MS = 3_600_000
# Serves with few descriptors until its input ends; arguments: soft and hard limit.
SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from pagekv.common.server import GrpcServer, run_async
async def main():
    server = GrpcServer("127.0.0.1:0", [], reflection=False)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    return 0
run_async(main)
"""


def run(body: Callable[[int], Awaitable[None]]) -> None:
    async def main() -> None:
        it = GrpcServer("127.0.0.1:0", [], reflection=False)
        port = await it.start()
        try:
            async with asyncio.timeout(300):
                await body(port)
        finally:
            await it.stop(0)

    asyncio.run(main())


def stub(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def check(channel: grpc.aio.Channel) -> None:
    await stub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=120)


async def closed(connection: socket.socket) -> None:
    """Returns when the other side has closed."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    with contextlib.suppress(ConnectionError):
        while await loop.sock_recv(connection, 4096):
            pass


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def test_connections_beyond_the_cap_are_closed_and_those_before_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(server, "HANDSHAKE_MS", NEVER_MS)

    async def body(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as before:
            await check(before)
            silent = [connect(port) for _ in range(7)]
            await closed(connect(port))
            await check(before)
            for connection in silent:
                connection.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as after:
            await check(after)

    run(body)


@pytest.mark.parametrize(("limit", "says"), [("HANDSHAKE_MS", b""), ("IDLE_MS", PREFACE)])
def test_a_connection_that_calls_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, limit: str, says: bytes) -> None:
    for name in ("HANDSHAKE_MS", "IDLE_MS"):
        monkeypatch.setattr(server, name, 300 if name == limit else NEVER_MS)

    async def body(port: int) -> None:
        connection = connect(port)
        connection.sendall(says)
        await closed(connection)

    run(body)


def test_a_call_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_MS", 200)

    async def body(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = stub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            idle = connect(port)
            idle.sendall(PREFACE)
            await closed(idle)
            idle = connect(port)  # and as long again
            idle.sendall(PREFACE)
            await closed(idle)
            assert not watch.done()
            watch.cancel()

    run(body)


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1_000_000, 4096), (4352, 4096), (1024, 768), (256, 128), (64, 32)]
)
def test_descriptors_are_kept_for_the_rest(monkeypatch: pytest.MonkeyPatch, descriptors: int, connections: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert connection_limit() == connections


@pytest.mark.parametrize("flags", [["pagekv.kvmanager"], ["pagekv.executor", "--backend", "oracle"]])
def test_too_few_descriptors_are_refused_in_one_line(tmp_path: Path, flags: list[str]) -> None:
    """gRPC ended with a segmentation fault."""
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", *flags, "--listen=127.0.0.1:0", f"--port-file={port_file}"]
    limited = ["sh", "-c", 'ulimit -n 16; exec "$@"', "sh", *command]
    ended = subprocess.run(limited, env=environment(), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    words = "this process may have 16 open files, and needs 64 or more: raise its limit"
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert read_port_file(port_file)["cannot_start"].startswith(words)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip("a thousand connections need descriptors of their own")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("hard", [4096, pytest.param(1024, marks=pytest.mark.long)])
def test_a_thousand_idle_connections_shut_nobody_out(hard: int) -> None:
    """With the usual 1024 descriptors: more are asked for; where there are no more, a newcomer waits until those that
    say nothing are closed, and whoever is connected is served all the time.
    """
    argv = [sys.executable, "-c", SERVER, "1024", str(hard)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(process.stdout.readline())

        async def main() -> None:
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as before,
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as newcomer,
            ):
                await check(before)
                with contextlib.ExitStack() as silent:
                    for _ in range(1000):
                        silent.enter_context(connect(port))
                    await check(before)
                    await check(newcomer)

        asyncio.run(main())
        process.stdin.close()
