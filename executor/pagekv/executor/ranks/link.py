"""The connection between rank 0 and another rank: messages of several kinds, in order, over a stream socket."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

# Seconds that sending the last message of a rank may take.
LAST_WORDS_S = 0.2
# The longest message is a step, of at most 4 MiB (P13).
MAX_BYTES = 16 * 2**20
_HEADER = struct.Struct("<BI")


class Kind(IntEnum):
    """The kind of a message. The content is JSON, except for STEP (the bytes of a StepRequest), REPORT (a packed
    struct), and BEAT and BYE (empty).
    """

    # To rank 0: the rank's number and its facts. Rank 0's answer: all ranks are there; or why there is no group.
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    # Calls of the backend, and the answers of ranks.
    DESCRIBE = 4
    ALLOCATE = 5
    ANSWER = 6
    # The limits of an epoch; a step of it; a rank's report on a step.
    EPOCH = 7
    STEP = 8
    REPORT = 9
    # A step that a rank refused, or could not compute.
    FAILED = 10
    # In both directions: this rank is alive.
    BEAT = 11
    # From rank 0: the group ends in order.
    BYE = 12
    # In both directions: this rank ends, and why.
    ENDS = 13
    # In both directions: the group ends, and another start would fail for the same reason.
    CANNOT_START = 14


_KINDS = {int(kind): kind for kind in Kind}


class LinkLost(Exception):
    """The connection has ended, or has delivered bytes that are not a message."""


class Message(NamedTuple):
    """A received message."""

    kind: Kind
    data: bytes

    @property
    def content(self) -> Any:
        """The decoded JSON. Raises LinkLost if the data is no JSON."""
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise LinkLost(f"a message of kind {self.kind.name} is no JSON") from error


class RankLink:
    """A connection to another rank. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # The process id of the rank at the other end, if the same torchrun has started it; else 0.
        self.peer_pid = 0
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._file = connection.makefile("rb")

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Sends a message. Raises LinkLost."""
        with self._sending:
            self._send(kind, data)

    def limit_sends(self, timeout_s: float) -> None:
        """From now on the connection breaks if the peer accepts no bytes of a message for `timeout_s` seconds: it is
        cut off or hangs, and its buffers are full.
        """
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(1e6 * rest))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def beat(self) -> None:
        """Sends BEAT, unless another message is being sent, which shows as well that this rank is alive. Raises
        LinkLost.
        """
        if self._sending.acquire(blocking=False):
            try:
                self._send(Kind.BEAT, b"")
            finally:
                self._sending.release()

    def say_last(self, reason: str, kind: Kind = Kind.ENDS) -> None:
        """Sends ENDS or CANNOT_START, if that is possible within LAST_WORDS_S."""
        if self._sending.acquire(timeout=LAST_WORDS_S):
            try:
                with suppress(LinkLost, OSError):
                    self.limit_sends(LAST_WORDS_S)
                    self._send(kind, json.dumps(reason).encode())
            finally:
                self._sending.release()

    def _send(self, kind: Kind, data: bytes) -> None:
        try:
            self._socket.sendall(_HEADER.pack(kind, len(data)) + data)
        # The limit of `limit_sends`.
        except BlockingIOError as error:
            # Part of a message may have been sent, after which no other message can be read.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise LinkLost("it reads nothing any more") from error
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from error

    def send_json(self, kind: Kind, content: Any) -> None:
        """Sends a message with JSON content. Raises LinkLost."""
        self.send(kind, json.dumps(content).encode())

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises LinkLost, also if nothing comes for `timeout_s` seconds. None waits for ever."""
        try:
            if self._socket.gettimeout() != timeout_s:
                self._socket.settimeout(timeout_s)
            number, size = _HEADER.unpack(self._read(_HEADER.size))
            kind = _KINDS.get(number)
            if size > MAX_BYTES or kind is None:
                raise LinkLost(f"a message of kind {number} and {size} bytes, which no rank sends")
            return Message(kind, self._read(size))
        # ValueError: `close` has closed the file meanwhile.
        except (OSError, ValueError) as error:
            raise LinkLost(f"the connection broke: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether the other end is gone. Call only while no thread receives."""
        try:
            # poll, because select does not accept descriptors above 1023.
            come = select.poll()
            come.register(self._socket, select.POLLIN)
            return bool(come.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise LinkLost("the connection ended")
        return data

    def close(self) -> None:
        """Ends the connection; a thread that receives gets LinkLost. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # The descriptor stays open until the file is closed too.
        self._file.close()
        self._socket.close()
