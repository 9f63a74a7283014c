"""Ports that the processes of one stack listen at, free when they are chosen and held from then on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from pagekv.client.launcher.child_flags import tcp_port
from pagekv.client.launcher.errors import StackError

# Errors of a port, whatever the address: others are of the address.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


class HeldPorts:
    """Ports in use. No other process of this machine is given one that it did not ask for.

    Linux gives a port that is held to nobody who asks for any, and lets a process listen there that asks for it by
    number, as gRPC, ZeroMQ, aiohttp and the gateway do: with SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def target(self, host: str, port: int, flag: str) -> str:
        """`host`, an address of IPv6 in brackets, with `port`, or with a free one for 0, which is held from now on.
        Raises StackError, with what to do about it by `flag`, where it is taken.
        """
        if port and port in self._sockets:
            raise StackError(f"{flag} {port}: two processes cannot have one port; {flag} 0 takes a free one")
        probe = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
        try:
            # A port in TIME_WAIT is free for gRPC, which binds in this way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            probe.close()
            if error.errno not in _PORT_ERRORS:
                raise StackError(f"--host {host}: this machine cannot listen there ({error.strerror})") from error
            raise StackError(
                f"port {port} of {host} cannot be used ({error.strerror}): is PageKV running already? "
                f"Choose another with {flag}, or {flag} 0 for a free one"
            ) from error
        found: int = probe.getsockname()[1]
        if found in self._sockets:
            # Free at this host, and another process of the stack has it at another.
            probe.close()
            return self.target(host, port, flag)
        self._sockets[found] = probe
        return f"{host}:{found}"

    def hold(self, endpoints: Mapping[str, str]) -> None:
        """Holds the ports of TCP endpoints, given by the flags that name them. Raises StackError where one is taken."""
        for name, endpoint in endpoints.items():
            if port := tcp_port(endpoint):
                try:
                    # On every interface: the host may be a name or * that only ZeroMQ knows.
                    self.target("", port, f"--{name}")
                except StackError as error:
                    raise StackError(
                        f"--{name} {endpoint}: this port cannot be had; choose another, or 0 for any"
                    ) from error

    def close(self) -> None:
        """Holds none any more. Idempotent."""
        while self._sockets:
            self._sockets.popitem()[1].close()
