"""A relay between ranks and rank 0, which can cut them off: what is sent is lost, and no connection is seen to end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """Listens on `port` of this machine from construction until `close`. A connection says first, in a line, to which
    host and port it goes on.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = threading.Event()
        # Every one that is open, and a few that are not.
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing gets through as long as the context lasts; the connections until then end with it."""
        self._cut.set()
        try:
            yield
        finally:
            self._end_all()
            self._cut.clear()

    def close(self) -> None:
        """Idempotent."""
        # A thread that accepts keeps the port else.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        while self._ends:
            _end(self._ends.pop())

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        try:
            line = b""
            while not line.endswith(b"\n"):
                line += near.recv(1) or b"\n"
            host, port = line.split()
            if self._cut.is_set():
                return
            far = socket.create_connection((host.decode(), int(port)))
        except (OSError, ValueError):
            _end(near)
            return
        self._ends.append(far)
        threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
        self._pump(near, far)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self._cut.is_set():
                    sink.sendall(data)
        if not self._cut.is_set():
            _end(source)
            _end(sink)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
