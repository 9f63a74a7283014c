"""Why a server cannot listen at an address. gRPC gives no reason; a socket that is bound in the same way does."""

from __future__ import annotations

import errno
import os
import socket

IN_USE = "another process is using it"
# For a path, whose place may also be taken by a file or a folder.
TAKEN = "another process's socket, or something else, is there"
UNKNOWN = "gRPC cannot use it and does not say why; is another process using it?"
_WORDS = {errno.EADDRINUSE: IN_USE, errno.EADDRNOTAVAIL: "this machine does not have that address"}


def is_served(listen: str) -> bool:
    """Whether a process listens at this address, if it is unix:/path. gRPC would take the path from that process, which
    would go on without noticing; a path that a process has left behind is free.
    """
    if not listen.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(listen.removeprefix("unix:").removeprefix("//"))
        except BlockingIOError:
            # Its queue of connections is full.
            return True
        except OSError:
            return False
    return True


def why_not_listen(listen: str) -> str:
    """The reason in words, for an address (host:port or unix:/path) that gRPC could not bind."""
    try:
        if listen.startswith("unix:"):
            _bind_path(listen.removeprefix("unix:"))
        else:
            _bind_port(listen)
    except (socket.gaierror, UnicodeError):
        # Some names cannot even be asked for: those with an empty part, or with one of over 63 letters.
        return "no address is found for this name"
    except OSError as error:
        if error.errno == errno.EADDRINUSE and listen.startswith("unix:"):
            return TAKEN
        # A path that is too long has no number.
        return _WORDS.get(error.errno or 0, error.strerror or str(error))
    # The address has become free meanwhile, or gRPC does not understand it.
    return UNKNOWN


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
