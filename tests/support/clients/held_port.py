"""Ports that a test names before something listens there, or after it has ceased to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def hold(port: int = 0) -> socket.socket:
    """A socket at a loopback port, by default a free one, where it does not listen: who connects is refused. Until it
    is closed, nobody is given the port who asks for any; gRPC and others that set SO_REUSEADDR may listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


@contextmanager
def held_port() -> Iterator[int]:
    """A free port, held for as long as the context lasts."""
    with hold() as held:
        yield held.getsockname()[1]
