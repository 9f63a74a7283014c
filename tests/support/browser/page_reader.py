"""The reading of the stream by the page: the manager's messages read back, as codec.js and main.js do."""

from __future__ import annotations

import base64
import struct
from typing import Any


def apply_change(states: bytearray, change: dict[str, str]) -> None:
    """Changes the bytes of blocks as a message says."""
    if "all" in change:
        states[:] = base64.b64decode(change["all"])
    elif "runs" in change:
        data = base64.b64decode(change["runs"])
        for start, length, value in struct.iter_unpack("<IIB", data):
            states[start : start + length] = bytes([value]) * length


class PageReader:
    """A page without a browser."""

    def __init__(self) -> None:
        self.snapshots = 0
        self.messages = 0
        self.device = bytearray()
        self.host = bytearray()
        self.requests: dict[str, Any] = {}
        self.totals: dict[str, Any] = {}
        self.points: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def take(self, message: dict[str, Any]) -> None:
        """The next message."""
        self.messages += 1
        if message["type"] == "snapshot":
            self.snapshots += 1
            self.device, self.host = bytearray(message["shown"]), bytearray(message["host_shown"])
            self.points = []
        apply_change(self.device, message.get("device", {}))
        apply_change(self.host, message.get("host", {}))
        self.requests = message.get("requests", self.requests)
        self.totals = message.get("totals", self.totals)
        self.points += message.get("points", [])
        self.events += message.get("events", [])
