"""Watches the links of a rank: a link that ends, or is silent for too long, means that a rank is lost."""

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

# Exit status of a rank that lost another one; torchrun then starts all ranks again.
EXIT_LOST = 75
# Beats within the time for which a rank may be silent.
BEATS = 5
# The parent when this process started. If it ends, another process becomes the parent.
_PARENT = os.getppid()


def end_process(reason: str) -> None:
    """Ends this process at once, since its threads may hang in a collective until the library's timeout."""
    log.error("the group of ranks is broken: this rank ends, so that torchrun restarts it", reason=reason)
    logging.shutdown()
    os._exit(EXIT_LOST)


def end_start(reason: str, world: World) -> None:
    """Ends this rank at once, and the torchrun that would otherwise start it again for ever."""
    log.error("cannot start", reason=reason)
    end_torchrun(world)
    logging.shutdown()
    os._exit(1)


def end_torchrun(world: World) -> None:
    """Ends the torchrun that started this process, so that it does not start its ranks again. No exit status of a rank
    has that effect, so torchrun gets SIGTERM. Only its first rank sends it, since a second signal would disturb
    torchrun. Does nothing without torchrun, or if it is gone.
    """
    if world.has_store and world.local_rank == 0 and os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGTERM)


def end_sibling(pid: int, parent: int) -> None:
    """Sends SIGKILL to another rank that the same `parent`, torchrun, has started. torchrun itself would wait 30 s for
    a rank that hangs, however short its --shutdown-timeout is. A process with this id and another parent is left alone.
    """
    if pid == os.getpid():
        return
    with suppress(OSError):
        # By descriptor: even if the id is given to another process meanwhile, only this process gets the signal.
        process = os.pidfd_open(pid)
        try:
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


class RankWatch:
    """Sends a beat over each link and notices links over which nothing comes. `lost` is called with the reason, at most
    once, on the watch's thread or on the thread that calls `lose`.
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
        """`links`: by the rank at the other end. Watches from `start` on. `cannot_start` is called instead of `lost` if
        another start of the group would fail in the same way. `with_parent`: torchrun has started this process. Then
        the end of torchrun is a loss too, and a lost rank of the same torchrun is killed in case it hangs.
        """
        self.links, self.timeout_s = links, timeout_s
        for link in links.values():
            link.limit_sends(timeout_s)
        self._interval_s = timeout_s / BEATS
        self._lost, self._cannot_start = lost, cannot_start or lost
        # This rank's beats since something came, by rank: so the time for which a machine sleeps does not count.
        self._silent = dict.fromkeys(links, 0)
        self._parent = os.getppid() if with_parent else 0
        self._over = threading.Event()
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def start(self) -> None:
        """Starts to send beats and to count silence."""
        self._thread.start()

    def heard(self, rank: int) -> None:
        self._silent[rank] = 0

    def lose(self, reason: str, *ranks: int) -> None:
        """Ends the group because these ranks are lost, or this one if none is named, and tells the others. Other
        ranks that were silent for more than half of the allowed time are lost too: a collective that waits for such a
        rank may fail before its silence is noticed. Does nothing once the watch is over.
        """
        # Never released: several threads may notice the same loss.
        if not self._over.is_set() and self._losing.acquire(blocking=False):
            for rank in [rank for rank in self.links if rank not in ranks and 2 * self._silent[rank] > BEATS]:
                reason, ranks = f"{reason}; rank {rank} is silent", (*ranks, rank)
            self.end(reason, *ranks)
            for pid in [self.links[rank].peer_pid for rank in ranks if self._parent]:
                end_sibling(pid, self._parent)
            self._lost(reason)

    def give_up(self, reason: str) -> None:
        """Ends the group because it cannot start, and tells the others. Does nothing once the watch is over."""
        if not self._over.is_set() and self._losing.acquire(blocking=False):
            self.end(reason, kind=Kind.CANNOT_START)
            self._cannot_start(reason)

    def end(self, reason: str, *lost: int, kind: Kind = Kind.ENDS) -> None:
        """Stops watching, and tells the ranks that are not `lost` that this rank ends and why."""
        self._over.set()
        for rank, link in self.links.items():
            if rank not in lost:
                link.say_last(reason, kind)

    def stop(self) -> None:
        """Stops watching because the group ends in order: links may end from now on. Idempotent."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(self._interval_s):
            if self._parent and os.getppid() != self._parent:
                self.lose("the process that started this rank is gone")
            for rank, link in self.links.items():
                self._silent[rank] += 1
                if self._silent[rank] > BEATS:
                    self.lose(f"rank {rank} said nothing for {self.timeout_s:g} s (--rank-timeout-s)", rank)
                # LinkLost: the link's reader reports the loss.
                with suppress(LinkLost):
                    link.beat()
