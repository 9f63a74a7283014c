"""The watch over the connections of a rank: one that ends, or is silent for too long, means that a rank is lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pagekv.common.logs import Log
from pagekv.executor.ranks.link import Kind, LinkLost, RankLink
from pagekv.executor.world import World

log = Log(__name__)

# Of a rank that lost another one: torchrun starts all ranks anew.
EXIT_LOST = 75
# Beats in the time that a rank may be silent.
BEATS = 5
# Of this process when it started; another one has it once that has ended.
_PARENT = os.getppid()


def end_process(reason: str) -> None:
    """Ends this process at once: its threads may hang in a collective for as long as the library waits."""
    log.error("the group of ranks is broken: this rank ends, to be started anew", reason=reason)
    logging.shutdown()
    os._exit(EXIT_LOST)


def end_start(reason: str, world: World) -> None:
    """The same of a rank, and with it of the torchrun that would start it anew for ever."""
    log.error("cannot start", reason=reason)
    end_torchrun(world)
    logging.shutdown()
    os._exit(1)


def end_torchrun(world: World) -> None:
    """Has the torchrun that started this process end, instead of starting its ranks anew: for that it knows no exit
    status, but SIGTERM. From the first of its ranks, since a second one would disturb it. Nothing without torchrun, or
    where that is gone.
    """
    if world.has_store and world.local_rank == 0 and os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGTERM)


def end_sibling(pid: int, parent: int) -> None:
    """SIGKILL to another process that this parent has started, torchrun. It would wait 30 s for one that hangs, however
    short its --shutdown-timeout is, before it starts the ranks anew. Any other process with this number is let be.
    """
    if pid == os.getpid():
        return
    with suppress(OSError):
        # A number that is given to another process meanwhile is none of this process.
        process = os.pidfd_open(pid)
        try:
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


class RankWatch:
    """Sends a beat over each link, and notices one over which nothing came. `lost` is called with the reason, at most
    once, on a thread of the watch or of whoever calls `lose`.
    """

    def __init__(
        self,
        links: Mapping[int, RankLink],
        timeout_s: float,
        lost: Callable[[str], None] = end_process,
        *,
        cannot_start: Callable[[str], None] | None = None,
        with_parent: bool = False,
    ) -> None:
        """`links` by the rank at their other end. Watches from `start` on. `cannot_start` is called instead of `lost`
        where the group would find the same if it were started anew. `with_parent`: torchrun has started this process,
        so its end is a loss too, and a rank of its that is lost, but hangs, is ended.
        """
        self.links, self.timeout_s = links, timeout_s
        for link in links.values():
            link.limit_sends(timeout_s)
        self._interval_s = timeout_s / BEATS
        self._lost, self._cannot_start = lost, cannot_start or lost
        # Beats of our own since something came, by rank: a machine that slept does not count its sleep.
        self._silent = dict.fromkeys(links, 0)
        self._parent = os.getppid() if with_parent else 0
        self._over = threading.Event()
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def start(self) -> None:
        """Begins to beat and to count."""
        self._thread.start()

    def heard(self, rank: int) -> None:
        self._silent[rank] = 0

    def lose(self, reason: str, *ranks: int) -> None:
        """Loses these ranks, or this one where none is named, and tells the others; nothing once the watch is over."""
        # Never let go: several threads may find the same loss.
        if not self._over.is_set() and self._losing.acquire(blocking=False):
            self.end(reason, *ranks)
            for pid in [self.links[rank].peer_pid for rank in ranks if self._parent]:
                end_sibling(pid, self._parent)
            self._lost(reason)

    def give_up(self, reason: str) -> None:
        """The group cannot start: tells the others; nothing once the watch is over."""
        if not self._over.is_set() and self._losing.acquire(blocking=False):
            self.end(reason, kind=Kind.CANNOT_START)
            self._cannot_start(reason)

    def end(self, reason: str, *lost: int, kind: Kind = Kind.ENDS) -> None:
        """The group ends, since this rank does: tells so the ranks that are not lost."""
        self._over.set()
        for rank, link in self.links.items():
            if rank not in lost:
                link.say_last(reason, kind)

    def stop(self) -> None:
        """The group ends in order: connections may end. Idempotent."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(self._interval_s):
            if self._parent and os.getppid() != self._parent:
                self.lose("the process that started this rank is gone")
            for rank, link in self.links.items():
                self._silent[rank] += 1
                if self._silent[rank] > BEATS:
                    self.lose(f"rank {rank} said nothing for {self.timeout_s:g} s (--rank-timeout-s)", rank)
                # Its reader says that the link is lost.
                with suppress(LinkLost):
                    link.beat()
