"""Accepts the connections of the HTTP port, in a bounded number.

A connection counts from the moment that it is accepted, before the handshake of TLS: those who connect and say nothing
must not take the descriptors of the process. An event loop's own server says nothing of a handshake that is under way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Container
from contextlib import suppress
from typing import NamedTuple

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

# Connections that the system keeps until they are accepted.
BACKLOG = 100
# Seconds until the next attempt where none can be accepted, mostly for lack of descriptors.
PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class _Accepted(NamedTuple):
    connection: socket.socket
    # Ends when the connection is up, or could not be brought up.
    arrival: asyncio.Task[None]


class HttpListener:
    """States: built, `start`ed, stopped."""

    def __init__(
        self,
        server: web.Server,
        answering: Container[asyncio.BaseProtocol],
        *,
        most: int,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        silence_s: float,
    ) -> None:
        """Connections are served by `server`; `answering` has those with a request that is being answered. `most`: at
        a time. `handshake_s`: that TLS may take. A connection that acknowledges nothing for `silence_s` is closed.
        """
        self._server, self._answering, self._most = server, answering, most
        self._tls, self._handshake_s = tls, handshake_s if tls is not None else None
        self._silence_s = silence_s
        self._listening: list[socket.socket] = []
        # While it accepts nothing: when it will try again.
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        # Ends of handshakes: of connections that are not up yet, also of those closed since to make room.
        self._arriving: set[asyncio.Task[None]] = set()
        # In the order in which they were accepted; also some that have ended since the latest one.
        self._accepted: dict[RequestHandler, _Accepted] = {}

    async def start(self, host: str, port: int) -> int:
        """Listens at all addresses of a host that this system has; returns the port of the first. Raises OSError, and
        listens at none of them then.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        families = {family: _has_family(family) for family, *_ in found}
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                if families[family] or not any(families.values()):
                    listening = socket.create_server(address, family=family, backlog=BACKLOG)
                    self._listening.append(listening)
                    listening.setblocking(False)
                    # Connections inherit the option (tcp(7)).
                    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._silence_s * 1000))
                    loop.add_reader(listening, self._accept, listening)
        except OSError:
            await self.stop()
            raise
        return int(self._listening[0].getsockname()[1])

    async def stop(self) -> None:
        """Closes the port, and the connections that are not up yet. Idempotent."""
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.remove_reader(listening)
            listening.close()
        self._listening.clear()
        for pause in self._pauses.values():
            pause.cancel()
        for each in self._accepted.values():
            if not each.arrival.done():
                _shut(each.connection)
        if self._arriving:
            await asyncio.wait(self._arriving)

    def _accept(self, listening: socket.socket) -> None:
        """Called when a connection can be accepted."""
        paused = self._pauses.pop(listening, None) is not None
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if not paused:
                _log.warning("the HTTP port accepts nothing for now: %s", error.strerror)
            self._pause(listening)
            return
        connection.setblocking(False)
        up = frozenset(self._server.connections)
        self._accepted = {
            protocol: each for protocol, each in self._accepted.items() if protocol in up or not each.arrival.done()
        }
        if len(self._accepted) >= self._most and not self._close_idle():
            connection.close()
            return
        protocol = self._server()
        arrival = asyncio.get_running_loop().create_task(self._bring_up(connection, protocol), name="HTTP connection")
        self._arriving.add(arrival)
        arrival.add_done_callback(self._arriving.discard)
        self._accepted[protocol] = _Accepted(connection, arrival)

    def _pause(self, listening: socket.socket) -> None:
        """The connection stays where it is, so without a pause every turn of the event loop would try again."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._pauses[listening] = loop.call_later(PAUSE_S, loop.add_reader, listening, self._accept, listening)

    async def _bring_up(self, connection: socket.socket, protocol: RequestHandler) -> None:
        # Without a handshake, or with one that takes too long, the connection is closed.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )

    def _close_idle(self) -> bool:
        """Closes the oldest connection without a request that is being answered; False if there is none."""
        idle = next((protocol for protocol in self._accepted if protocol not in self._answering), None)
        if idle is None:
            return False
        connection = self._accepted.pop(idle).connection
        if idle.transport is not None:
            idle.transport.abort()
        else:
            _shut(connection)
        return True


def _shut(connection: socket.socket) -> None:
    """Ends a connection that is not up yet: its handshake fails, and the event loop closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _has_family(family: int) -> bool:
    """Whether this system has addresses of a family: a name may have one of IPv6 where the kernel has none."""
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True
