"""How ranks find each other and compare their facts, before anything is loaded: rank 0 listens, the others connect."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pagekv.executor.ranks.agreement import check_facts
from pagekv.executor.ranks.link import Kind, LinkLost, RankLink
from pagekv.executor.ranks.start_errors import CannotStart, MayPass
from pagekv.executor.world import World

# Timeout for a greeting in seconds; a rank sends it as soon as it is connected.
_GREETING_S = 5.0
# Seconds between two attempts to reach rank 0.
_AGAIN_S = 0.2


class NoGroup(MayPass, ValueError):
    """The ranks do not come together, but another start may succeed; the message says why, in one line."""


class JoinTime:
    """The time that ranks have to come together, counted from construction. `str()` gives
    `within 300 s (--join-timeout-s)`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 when the time is over."""
        return max(0.0, self._end - time.monotonic())

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s (--join-timeout-s)"


class Meeting(NamedTuple):
    """The address where rank 0 waits for the others, and the secret by which it recognises ranks of its group."""

    host: str
    port: int
    secret: str


def meeting_at(listener: socket.socket) -> Meeting:
    """A meeting at the address of a listening socket, with a new secret."""
    host, port = listener.getsockname()[:2]
    return Meeting(host, port, secrets.token_hex(16))


class Gathering:
    """Rank 0's side: accepts the other ranks as they come. At its end the listening socket is closed, the links stay
    open.
    """

    def __init__(self, listener: socket.socket, meeting: Meeting, world: World, facts: Mapping[str, Any]) -> None:
        self._listener, self._meeting, self._world = listener, meeting, world
        self._facts = {0: dict(facts)}
        self._links: dict[int, RankLink] = {}

    def gather(self, joining: JoinTime) -> dict[int, RankLink]:
        """Waits for all other ranks and returns the links to them, by rank. Raises NoGroup or CannotStart, and sends
        the reason to the other ranks.
        """
        try:
            while not self._all_there():
                self._wait(joining)
                connection, _ = self._listener.accept()
                self._greet(RankLink(connection))
            check_facts(self._facts)
        except (NoGroup, CannotStart) as error:
            for link in self._links.values():
                _refuse(link, str(error), Kind.CANNOT_START if isinstance(error, CannotStart) else Kind.REFUSED)
            raise
        finally:
            self._listener.close()
        for link in self._links.values():
            with suppress(LinkLost):  # the link's reader will report the loss
                link.send_json(Kind.WELCOME, _own_pid())
        return self._links

    def _all_there(self) -> bool:
        if len(self._links) == self._world.size - 1:
            for rank in list(self._links):
                self._forget_ended(rank)
        return len(self._links) == self._world.size - 1

    def _forget_ended(self, rank: int) -> None:
        """Forgets a rank whose link has ended: while others are still missing, it may be started again."""
        if rank in self._links and self._links[rank].ended:
            self._links.pop(rank).close()
            del self._facts[rank]

    def _wait(self, joining: JoinTime) -> None:
        if not select.select([self._listener], [], [], joining.left_s)[0]:
            missing = [rank for rank in range(1, self._world.size) if rank not in self._links]
            words = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
            raise NoGroup(f"{words} missing (of {self._world.size}): did not connect {joining}")

    def _greet(self, link: RankLink) -> None:
        try:
            message = link.receive(_GREETING_S)
            hello = message.content
            if message.kind is not Kind.HELLO or hello.get("secret") != self._meeting.secret:
                raise LinkLost("no rank of this group")
            rank, size, facts = int(hello["rank"]), int(hello["size"]), dict(hello["facts"])
            link.peer_pid = _pid_here(hello)
        except (LinkLost, KeyError, TypeError, ValueError, AttributeError):
            link.close()
            return
        self._forget_ended(rank)
        reason = ""
        if size != self._world.size:
            reason = f"rank {rank} was started with WORLD_SIZE {size}, rank 0 with {self._world.size}"
        elif rank in self._facts:
            reason = f"two ranks have number {rank} (RANK)"
        if reason:
            _refuse(link, reason)
            raise NoGroup(reason)
        self._links[rank], self._facts[rank] = link, facts


def _own_pid() -> dict[str, Any]:
    """The id of this process, and the number of the torchrun that started it; each machine has one torchrun."""
    return {"pid": os.getpid(), "group_rank": os.environ.get("GROUP_RANK", "")}


def _pid_here(content: Mapping[str, Any]) -> int:
    """The process id of a rank of the same torchrun; 0 for a rank elsewhere, whose id may belong to any process
    here.
    """
    own = _own_pid()
    return int(content.get("pid", 0)) if content.get("group_rank") == own["group_rank"] else 0


def _refuse(link: RankLink, reason: str, kind: Kind = Kind.REFUSED) -> None:
    with suppress(LinkLost):
        link.send_json(kind, reason)


def join(
    find: Callable[[], Meeting], world: World, facts: Mapping[str, Any], joining: JoinTime
) -> tuple[RankLink, Meeting]:
    """Connects this rank to rank 0 and waits until all ranks are there. Returns the link and the meeting. `find`
    returns where rank 0 is at present, since a restarted rank 0 has another address, and raises NoGroup if there is no
    rank 0. Raises NoGroup or CannotStart, also when rank 0 refuses.
    """
    while joining.left_s:
        meeting = find()
        link = _connected(meeting)
        if link is not None:
            hello = {"secret": meeting.secret, "rank": world.rank, "size": world.size, "facts": dict(facts)}
            hello |= _own_pid()
            try:
                link.send_json(Kind.HELLO, hello)
                # Waits for other ranks too: rank 0 answers when all are there or its own time is over.
                answer = link.receive(joining.left_s + _GREETING_S)
            except LinkLost:
                link.close()  # this rank 0 was ending
            else:
                if answer.kind is Kind.WELCOME:
                    link.peer_pid = _pid_here(answer.content)
                    return link, meeting
                link.close()
                raise (CannotStart if answer.kind is Kind.CANNOT_START else NoGroup)(str(answer.content))
        time.sleep(_AGAIN_S)
    raise NoGroup(f"rank 0 is missing: it did not answer rank {world.rank} {joining}")


def _connected(meeting: Meeting) -> RankLink | None:
    try:
        return RankLink(socket.create_connection((meeting.host, meeting.port), _GREETING_S))
    except OSError:
        return None
