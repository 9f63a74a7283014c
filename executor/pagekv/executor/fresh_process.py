"""Replaces the executor by a fresh process when its device is lost to the present one.

After a kernel fault (an illegal address, a failed launch) a CUDA context is dead for good, and every later call of the
process fails. So the process replaces itself: it execs its own command line with its present address. The process id
stays the same, so a supervisor (`pagekv up`, a container, a shell) need not know.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from pagekv.common.logs import Log

log = Log(__name__)

# The environment variable that tells the next process the number of faults in a row. Not a flag, hence the underscore.
FAULTS = "_PAGEKV_DEVICE_FAULTS"
# After this many seconds of serving, a fault counts as the first in a row again.
STEADY_S = 600.0
# After the first fault there is no pause. Further faults lead to pauses that double from FIRST_PAUSE_S to LAST_PAUSE_S,
# so that a fault at every start does not keep machine and manager busy.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0


def faults_before() -> int:
    """The number of faults in a row before this process; 0 if `start_anew` did not start it."""
    text = os.environ.get(FAULTS, "")
    return int(text) if text.isdecimal() else 0


def pause_s(faults: int) -> float:
    """Seconds to wait after `faults` faults in a row."""
    return 0.0 if faults < 2 else min(FIRST_PAUSE_S * 2 ** min(faults - 2, 10), LAST_PAUSE_S)


async def start_anew(stop: asyncio.Event, listen: str, reason: str, served_s: float) -> int:
    """After a pause, replaces this process by a new one that listens on `listen`. `served_s`: how long this process has
    served. Returns, with the exit status, only if `stop` is set.
    """
    faults = 1 if served_s >= STEADY_S else faults_before() + 1
    pause = pause_s(faults)
    log.error("restarting in a fresh process", reason=reason, faults_in_a_row=faults, pause_s=pause, listen=listen)
    with suppress(TimeoutError):
        async with asyncio.timeout(pause):
            await stop.wait()
    if stop.is_set():
        return 0
    os.environ[FAULTS] = str(faults)
    address = ["--listen", listen]
    command = [sys.executable, *sys.orig_argv[1:]]
    if command[-2:] != address:
        command += address
    _leave_files_behind()
    os.execv(sys.executable, command)


def _leave_files_behind() -> None:
    """Closes the files of this process at exec: open files of the device would keep the dead context and its memory."""
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            if int(entry.name) > 2:
                with suppress(OSError):  # the descriptor of this listing itself is closed by now
                    os.set_inheritable(int(entry.name), False)
