"""The connection between rank 0 and another rank: messages with a kind, in order, over a stream socket."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

# Seconds that the last words of a rank may take.
LAST_WORDS_S = 0.2
# A step has 4 MiB at most (P13), and nothing else is as long.
MAX_BYTES = 16 * 2**20
_HEADER = struct.Struct("<BI")


class Kind(IntEnum):
    """The kind of a message; JSON but for STEP, the bytes of a StepRequest, REPORT and BEAT, which is empty."""

    # To rank 0: who it is, and what has to agree. To it: all are there; or the group does not come about, and why.
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    # Calls of the backend, and their answers.
    DESCRIBE = 4
    ALLOCATE = 5
    ANSWER = 6
    # Limits of an epoch; one of its steps; what a rank made of it.
    EPOCH = 7
    STEP = 8
    REPORT = 9
    # A step that a rank refused, or could not compute.
    FAILED = 10
    # Both ways: this rank lives.
    BEAT = 11
    # To the others: the group ends in order.
    BYE = 12
    # Both ways: this rank ends, and why.
    ENDS = 13
    # Both ways: the group ends, and would find the same if it were started anew.
    CANNOT_START = 14


_KINDS = {int(kind): kind for kind in Kind}


class LinkLost(Exception):
    """The connection has ended, or brought something that is no message."""


class Message(NamedTuple):
    """A message as it came."""

    kind: Kind
    data: bytes

    @property
    def content(self) -> Any:
        """The value that its JSON stands for. Raises LinkLost."""
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise LinkLost(f"a message of kind {self.kind.name} is no JSON") from error


class RankLink:
    """Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Of the rank at the other end, as it says on its own machine; 0: not said.
        self.peer_pid = 0
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._file = connection.makefile("rb")

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Raises LinkLost."""
        with self._sending:
            self._send(kind, data)

    def limit_sends(self, timeout_s: float) -> None:
        """From now on a message of which nothing is taken for so many seconds breaks the connection: the peer is cut
        off or hangs, and its buffers are full.
        """
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(1e6 * rest))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def beat(self) -> None:
        """Sends BEAT, unless a message is being sent, which tells as much. Raises LinkLost."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(Kind.BEAT, b"")
            finally:
                self._sending.release()

    def say_last(self, reason: str, kind: Kind = Kind.ENDS) -> None:
        """Sends ENDS or CANNOT_START if that can be done at once."""
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
        # Of `limit_sends`.
        except BlockingIOError as error:
            # Half a message may be out, behind which nothing can be told.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise LinkLost("it takes nothing any more") from error
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from error

    def send_json(self, kind: Kind, content: Any) -> None:
        """Raises LinkLost."""
        self.send(kind, json.dumps(content).encode())

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises LinkLost, also when nothing comes for `timeout_s` seconds; None: waits for ever."""
        try:
            if self._socket.gettimeout() != timeout_s:
                self._socket.settimeout(timeout_s)
            number, size = _HEADER.unpack(self._read(_HEADER.size))
            kind = _KINDS.get(number)
            if size > MAX_BYTES or kind is None:
                raise LinkLost(f"a message of kind {number} and {size} bytes, which no rank sends")
            return Message(kind, self._read(size))
        # ValueError: of a file that `close` has closed meanwhile.
        except (OSError, ValueError) as error:
            raise LinkLost(f"the connection broke: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether the other end is gone, of a link from which nobody receives."""
        try:
            # Unlike select's, its descriptors may be any number.
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
        """Ends the connection; whoever receives gets LinkLost. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # The descriptor stays open as long as the file is.
        self._file.close()
        self._socket.close()
