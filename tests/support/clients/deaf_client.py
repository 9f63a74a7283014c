"""A client of a gRPC port that takes nothing of what is written to its calls: HTTP/2 by hand (RFC 9113)."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(method: bytes) -> bytes:
    """The headers of a gRPC call, each a literal of at most 126 bytes (RFC 7541, 6.2.2)."""
    named = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in named.items())


def deaf_call(port: int, method: bytes, message: bytes = b"") -> socket.socket:
    """A connection with one call, `method` with its leading slash, of which no byte of an answer can be written."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(PREFACE + b"".join(deaf_frames(method, message)))
    return connection


def deaf_frames(method: bytes, message: bytes) -> list[bytes]:
    """The frames of such a call: settings, their acknowledgement, headers, the message."""
    return [
        frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)),
        frame(SETTINGS, ACK),
        frame(HEADERS, END_HEADERS, 1, headers(method)),
        frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message),
    ]
