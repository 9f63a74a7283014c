"""Why a server cannot listen at an address. gRPC gives no reason; a socket that is bound in the same way does."""

from __future__ import annotations

import errno
import os
import socket

IN_USE = "is another process using it?"
_WORDS = {errno.EADDRINUSE: IN_USE, errno.EADDRNOTAVAIL: "this machine does not have that address"}


def why_not_listen(listen: str) -> str:
    """The reason in words, for an address (host:port or unix:/path) that gRPC could not bind."""
    try:
        if listen.startswith("unix:"):
            _bind_path(listen.removeprefix("unix:"))
        else:
            _bind_port(listen)
    except socket.gaierror:
        return "no address is known for this name"
    except OSError as error:
        # A path that is too long has no number.
        return _WORDS.get(error.errno or 0, error.strerror or str(error))
    # The address has become free meanwhile.
    return IN_USE


def _bind_path(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
        os.unlink(path)


def _bind_port(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        # A port in TIME_WAIT is free for gRPC, which binds in this way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        # With SO_REUSEADDR, a port at which another process listens may be refused only here.
        probe.listen()
