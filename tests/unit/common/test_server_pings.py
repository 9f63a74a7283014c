"""Connections that ping while no call is open, as a manager's does between two epochs, are not ended for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagekv.common import server
from pagekv.common.server import GrpcServer

# The contract of steps (P10) has a manager ping this often; a server must allow it.
PING_INTERVAL_MS = 10_000
LEAST_INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"
# Frame types of HTTP/2, and the frames that a client begins with: its settings, and that it has read the server's.
PING, GOAWAY = 6, 7
ACKNOWLEDGED = 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"


async def answers_to(pings: int, pause_s: float) -> list[int]:
    """Types of the frames, PING or GOAWAY, that answer so many pings."""
    grpc_server = GrpcServer("127.0.0.1:0", [], reflection=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", await grpc_server.start())

    async def answer() -> int:
        while True:
            header = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(header[:3], "big"))
            kind, flags = header[3], header[4]
            if kind == GOAWAY or (kind == PING and flags & ACKNOWLEDGED):
                return kind

    writer.write(PREFACE)
    answers: list[int] = []
    try:
        while len(answers) < pings and GOAWAY not in answers:
            writer.write(b"\0\0\x08" + bytes([PING, 0]) + bytes(4) + b"8 octets")
            answers.append(await answer())
            await asyncio.sleep(pause_s)
    finally:
        writer.close()
        await grpc_server.stop(0)
    return answers


def test_pings_without_a_call_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shorter interval than in service, so that the test need not wait for it; a slow machine only pings less
    often.
    """
    options: dict[str, Any] = dict(server.SERVER_OPTIONS)
    assert options[LEAST_INTERVAL] <= PING_INTERVAL_MS
    monkeypatch.setattr(server, "SERVER_OPTIONS", [*{**options, LEAST_INTERVAL: 50}.items()])
    assert asyncio.run(asyncio.wait_for(answers_to(6, 0.15), 120)) == [PING] * 6
