"""A server on loopback that answers as the test says, and counts what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class KeyServer:
    """The answer that it gives, and the paths that were asked for."""

    body: bytes = b""
    status: int = 200
    location: str = ""
    # Seconds between two bytes of the body.
    pause_s: float = 0.0
    # Whether the pause comes between bytes of the headers, too.
    slow_headers: bool = False
    port: int = 0
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/keys?v=1"


@contextmanager
def key_server(body: bytes = b"") -> Iterator[KeyServer]:
    answers = KeyServer(body)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append(self.path)
            location = f"Location: {answers.location}\r\n" if answers.location else ""
            head = f"HTTP/1.1 {answers.status} x\r\n{location}Connection: close\r\n\r\n".encode()
            try:
                if answers.slow_headers:
                    self._slowly(head)
                else:
                    self.wfile.write(head)
                if answers.pause_s:
                    self._slowly(answers.body)
                else:
                    self.wfile.write(answers.body)
            except OSError:
                return

        do_CONNECT = do_GET

        def _slowly(self, data: bytes) -> None:
            for byte in data:
                if ended.is_set():
                    return
                self.wfile.write(bytes([byte]))
                time.sleep(answers.pause_s)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test says what was asked."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
