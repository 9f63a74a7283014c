"""CPU time of processes and of the machine, from /proc, and processes that do nothing but use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Fields of the first line of /proc/stat, see proc_stat(5), that are work: user, nice, system, irq, softirq, and what
# the hypervisor gave to others.
WORK = (0, 1, 2, 5, 6, 7)
# Processes are idle once they use at most IDLE_CORES for PAUSE_S. Nobody waits longer than MOST_PAUSES for that.
PAUSE_S, IDLE_CORES, MOST_PAUSES = 0.5, 0.05, 40


def machine_s(proc: Path = PROC) -> float:
    """CPU seconds that all cores have worked."""
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[at]) for at in WORK) / TICKS


def tree_s(pid: int, proc: Path = PROC) -> float:
    """CPU seconds of a process and of those below it; 0 where it is gone."""
    with suppress(OSError):
        fields = (proc / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        children = {
            int(child)
            for thread in (proc / str(pid) / "task").iterdir()
            for child in (thread / "children").read_text().split()
        }
        return (int(fields[11]) + int(fields[12])) / TICKS + sum(tree_s(child, proc) for child in children)
    return 0.0


def trees_s(pids: Iterable[int]) -> float:
    """CPU seconds of all of them."""
    return sum(map(tree_s, pids))


def wait_until_idle(
    pids: Collection[int],
    used_s: Callable[[Collection[int]], float] = trees_s,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits PAUSE_S or a multiple of it, until these processes and those below them are idle. False if they are not
    idle after MOST_PAUSES.
    """
    for _ in range(MOST_PAUSES):
        before = used_s(pids)
        pause(PAUSE_S)
        if used_s(pids) - before <= IDLE_CORES * PAUSE_S:
            return True
    return False


@contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Process ids of so many processes that spin, each on the core that the system gives it."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
            process.wait()
