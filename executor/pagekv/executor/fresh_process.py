"""The executor comes back as a fresh process when its device is lost to this one.

After a fault of a kernel (an illegal address, a failed launch) a CUDA context is dead for good, and every later call of
the process fails. So the process replaces itself, by exec of its own command line with the address it has. The process
id stays the same, so a supervisor (`pagekv up`, a container, a shell) need not know.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from pagekv.common.logs import Log

log = Log(__name__)

# Tells the next process how many came before it in a row; no flag, hence the underscore.
FAULTS = "_PAGEKV_DEVICE_FAULTS"
# Seconds between two faults that have nothing to do with each other.
STEADY_S = 600.0
# The first fault is answered at once, further ones after pauses that are doubled from the first to the last: a fault at
# every start must not keep machine and manager busy.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0


def faults_before() -> int:
    """Faults in a row before this process; 0 for one that was not started by `start_anew`."""
    text = os.environ.get(FAULTS, "")
    return int(text) if text.isdecimal() else 0


def pause_s(faults: int) -> float:
    """Seconds to wait after so many faults in a row."""
    return 0.0 if faults < 2 else min(FIRST_PAUSE_S * 2 ** min(faults - 2, 10), LAST_PAUSE_S)


async def start_anew(stop: asyncio.Event, listen: str, reason: str, served_s: float) -> int:
    """Replaces this process by one that listens on `listen`, after a pause. `served_s`: how long this one has served.
    Returns, with the exit status, only when `stop` was set.
    """
    faults = 1 if served_s >= STEADY_S else faults_before() + 1
    pause = pause_s(faults)
    log.error("starting anew in a fresh process", reason=reason, faults_in_a_row=faults, pause_s=pause, listen=listen)
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
    """No file of this process outlives it in the next: the device's would keep the dead context and its memory."""
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            if int(entry.name) > 2:
                with suppress(OSError):  # that of the listing itself is closed by now
                    os.set_inheritable(int(entry.name), False)
