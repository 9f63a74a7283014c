"""Connections to a gRPC port that speak HTTP/2 badly, or well and without taking a byte of the answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from support.clients.deaf_client import PREFACE, deaf_frames, frame
from support.fuzz.calls import FORBIDDEN, Methods
from support.fuzz.messages import encoded
from support.fuzz.mutations import damaged

MAX_METHOD = 126


@dataclass(frozen=True)
class Connection:
    """All that is written, to which process, and seconds until the client closes."""

    port: str
    data: bytes
    patience_s: float
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes that are sent at most."""
        return len(self.data)


def make_connection(rng: random.Random, methods: Mapping[str, Methods]) -> Connection:
    """The connection that these random numbers mean; `methods` of each process."""
    port = rng.choice(list(methods))
    method = methods[port].draw(rng)
    message = encoded(rng, method.input_type, forbidden=FORBIDDEN)
    name = f"/{method.containing_service.full_name}/{method.name}".encode()[:MAX_METHOD]
    if rng.random() < 0.05:
        name = damaged(rng, name)
    frames = deaf_frames(name, message)
    fate = rng.random()
    if fate < 0.3:
        at = rng.randrange(len(frames) + 1)
        frames[at:at] = [_wild(rng) for _ in range(rng.choice([1, 1, 3, 50]))]
    elif fate < 0.4:
        del frames[rng.randrange(len(frames))]
    elif fate < 0.5:
        frames += frames[2:] * rng.choice([1, 20])
    data = PREFACE + b"".join(frames)
    if fate > 0.9:
        at = rng.randrange(len(data))
        data = rng.choice((data[:at], data[:at] + rng.randbytes(3) + data[at + 3 :], rng.randbytes(200)))
    return Connection(port, data, rng.choice([0.0, 0.02, 0.2]))


def _wild(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.choice([0, 1, 4, 5, 8, 100]))
    return frame(
        rng.choice([*range(10), 255]), rng.choice([0, 1, 4, 5, 8, 255]), rng.choice([0, 1, 2, 3, 2**31 - 1]), payload
    )


async def perform(target: str, case: Connection) -> str:
    """Makes the connection. Any answer will do: what it may not do shows elsewhere."""
    host, _, port = target.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        return f"no connection: {error}"
    try:
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(case.patience_s):
                writer.write(case.data)
                while await reader.read(65536):
                    pass
    finally:
        writer.transport.abort()
    return ""


def shown(case: Connection) -> str:
    """All of a connection, for a failure's report."""
    return f"{case.port}: {case.data[:8192].hex()}, {case.size} bytes, patience {case.patience_s}"
