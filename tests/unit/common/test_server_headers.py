"""Headers and streams that are there to take memory or time, by hand: others are answered all the same."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.deaf_client import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, headers
from support.clients.memory import resident_mib
from support.event_loop import run_by

from pagekv.common.server import GrpcServer

RST_STREAM, CONTINUATION, CANCEL = 3, 9, 8
CHECK = b"/grpc.health.v1.Health/Check"
# The largest frame that a server takes without having said more.
LARGEST_FRAME = 16384
# Literals with a name of 1 byte, and a value that is announced with a number of 7 bits and more (RFC 7541, 5.1).
LITERAL = b"\0\x01x"


def run(body: Callable[[int], Awaitable[None]]) -> None:
    async def main() -> None:
        it = GrpcServer("127.0.0.1:0", [], reflection=False)
        port = await it.start()
        try:
            async with asyncio.timeout(240):
                await body(port)
                # Another caller is answered all the same.
                assert await status(port) is grpc.StatusCode.OK
        finally:
            await it.stop(0)

    asyncio.run(main())


async def status(port: int, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Of a call over a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as channel:
        call: Any = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), metadata=metadata, timeout=60, wait_for_ready=True
        )
        try:
            await call
        except grpc.aio.AioRpcError as error:
            print(error.details())
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("count", [1, 40], ids=["one of 40 KiB", "forty of 1 KiB"])
@run_by(run)
async def test_metadata_beyond_its_bound_refuse_the_call_alone(port: int, *, count: int) -> None:
    assert await status(port, *((f"x{at}", "v" * (40960 // count)) for at in range(count))) is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert await status(port, ("x", "v" * 4096)) is grpc.StatusCode.OK


def endless_blocks() -> dict[str, tuple[bytes, bytes]]:
    """The begin of a block of headers, and frames behind it that never end it."""
    more = frame(CONTINUATION, 0, 1, b"v" * LARGEST_FRAME)
    padded = frame(CONTINUATION, 0, 1, b"\x80" * LARGEST_FRAME)
    return {
        "a value of 4 GiB": (LITERAL + b"\x7f\xff\xff\xff\xff\x0e", more),
        "a length that is padded without end": (LITERAL + b"\x7f", padded),
        "headers without end": (b"", frame(CONTINUATION, 0, 1, (LITERAL + b"\x01v") * (LARGEST_FRAME // 5))),
    }


@pytest.mark.parametrize("kind", endless_blocks())
@run_by(run)
async def test_headers_without_end_hold_nobody_up_and_are_not_kept(port: int, *, kind: str) -> None:
    """gRPC ends a connection for the second kind. It reads the others on and drops them, with large buffers for what it
    reads (docs/security.md).
    """
    begin, more = endless_blocks()[kind]
    before = resident_mib(os.getpid(), "VmRSS")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            begun = frame(HEADERS, 0, 1, headers(CHECK) + begin)
            await loop.sock_sendall(connection, PREFACE + frame(SETTINGS) + begun)
            for _ in range(4):
                await asyncio.wait_for(loop.sock_sendall(connection, more * 256), 60)
                assert await status(port) is grpc.StatusCode.OK
            assert kind != "a length that is padded without end"
    assert resident_mib(os.getpid(), "VmRSS") < before + 256


@run_by(run)
async def test_streams_that_are_opened_and_reset_do_not_shut_others_out(port: int) -> None:
    """Five thousand calls, each cancelled behind its headers: more than gRPC itself lets wait."""
    before = resident_mib(os.getpid(), "VmRSS")
    reset = struct.pack(">I", CANCEL)
    waits = []
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, PREFACE + frame(SETTINGS))
        for first in range(1, 10_000, 2000):
            flood = b"".join(
                frame(HEADERS, END_HEADERS, stream, headers(CHECK)) + frame(RST_STREAM, 0, stream, reset)
                for stream in range(first, first + 2000, 2)
            )
            try:
                await asyncio.wait_for(loop.sock_sendall(connection, flood), 60)
            except OSError:
                break  # gRPC ends such a connection where it finds it too wild
            begun = time.monotonic()
            assert await status(port) is grpc.StatusCode.OK
            waits.append(time.monotonic() - begun)
    assert max(waits) < 30
    assert resident_mib(os.getpid(), "VmRSS") < before + 64
