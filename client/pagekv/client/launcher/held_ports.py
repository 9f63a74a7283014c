"""The ports of one stack. A port is free when it is chosen, and held from then on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from pagekv.client.launcher.child_flags import tcp_port
from pagekv.client.launcher.errors import StackError

# Errors that concern the port; other errors concern the address.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


class HeldPorts:
    """Ports in use. The system gives them to no other process that asks for any free port.

    A held port is bound with SO_REUSEADDR. Linux does not give it to a process that asks for port 0. A process that
    asks for it by number, also with SO_REUSEADDR, can listen there, as gRPC, ZeroMQ, aiohttp and the gateway do.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def target(self, host: str, port: int, flag: str) -> str:
        """The address `host:port`, with an IPv6 address in brackets. Port 0 is replaced by a free port. The port is
        held from now on. Raises StackError if the port is taken; the message says to use `flag`.
        """
        if port and port in self._sockets:
            raise StackError(f"{flag} {port}: two processes cannot use the same port; {flag} 0 takes a free one")
        probe = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
        try:
            # A port in TIME_WAIT is free for gRPC, which binds in this way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            probe.close()
            if error.errno not in _PORT_ERRORS:
                raise StackError(f"--host {host}: this machine cannot listen there ({error.strerror})") from error
            why = "is PageKV running already?" if error.errno == errno.EADDRINUSE else "it is for privileged users."
            raise StackError(
                f"port {port} of {host} cannot be used ({error.strerror}): {why} "
                f"Choose another with {flag}, or {flag} 0 for a free one"
            ) from error
        found: int = probe.getsockname()[1]
        if found in self._sockets:
            # The port is free at this host, but another process of the stack has it at another host.
            probe.close()
            return self.target(host, port, flag)
        self._sockets[found] = probe
        return f"{host}:{found}"

    def hold(self, endpoints: Mapping[str, str]) -> None:
        """Holds the ports of TCP endpoints, given by flag. Raises StackError if a port is taken."""
        for name, endpoint in endpoints.items():
            if port := tcp_port(endpoint):
                try:
                    # Checked on every interface, because the host may be a name or * that only ZeroMQ knows.
                    self.target("", port, f"--{name}")
                except StackError as error:
                    raise StackError(
                        f"--{name} {endpoint}: this port cannot be used; choose another, or 0 for a free one"
                    ) from error

    def close(self) -> None:
        """Releases all ports. Idempotent."""
        while self._sockets:
            self._sockets.popitem()[1].close()
