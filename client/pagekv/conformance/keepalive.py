"""Rule P10: a connection on which nothing happens but pings. It is watched while the other rules are tested."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from pagekv.conformance.link import CONNECT_S, KEEPALIVE_MS, open_channel
from pagekv.conformance.verdict import require

# Servers that take so many pings for an attack say so at the third or fourth.
NUM_PINGS = 4


class IdleConnection:
    """Pings from its making on, without a call. `idle_s`: how long that has to go well."""

    def __init__(self, target: str, ping_ms: int = KEEPALIVE_MS) -> None:
        self.idle_s = (NUM_PINGS + 0.5) * ping_ms / 1e3
        self._ready, self._lost = threading.Event(), threading.Event()
        self._channel = open_channel(target, ping_ms)
        self._channel.subscribe(self._changed, try_to_connect=True)
        self._since = time.monotonic()

    def _changed(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._ready.set()
        elif self._ready.is_set():
            self._lost.set()

    def check(self, waiting: Callable[[float], None]) -> None:
        """Waits until the connection was idle for so long, and tells `waiting`. Raises BrokenRule where it ended."""
        require(self._ready.wait(CONNECT_S), "a second connection is not accepted")
        left = self._since + self.idle_s - time.monotonic()
        if left > 0:
            waiting(left)
            self._lost.wait(left)
        require(not self._lost.is_set(), "the executor ended an idle connection with pings every 10 seconds")

    def close(self) -> None:
        self._channel.close()
