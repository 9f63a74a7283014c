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
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        # In the order in which they were accepted; also some that have ended since the latest one.
        self._accepted: dict[RequestHandler, _Accepted] = {}

    async def start(self, host: str, port: int) -> int:
        """Listens at all addresses of a host; returns the port of the first. Raises OSError, closed again."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self._listening.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError:
            await self.stop()
            raise
        for listening in self._listening:
            listening.setblocking(False)
            # Connections inherit the option (tcp(7)).
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._silence_s * 1000))
            loop.add_reader(listening, self._accept, listening)
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
        arriving = [each for each in self._accepted.values() if not each.arrival.done()]
        for each in arriving:
            _shut(each.connection)
        if arriving:
            await asyncio.wait([each.arrival for each in arriving])

    def _accept(self, listening: socket.socket) -> None:
        """Called when a connection can be accepted."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(listening, error)
            return
        self._pauses.pop(listening, None)
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
        self._accepted[protocol] = _Accepted(connection, arrival)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """The connection stays where it is, so without a pause every turn of the event loop would try again."""
        loop = asyncio.get_running_loop()
        if listening not in self._pauses:
            _log.warning("the HTTP port accepts nothing for now: %s", error.strerror)
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
