"""The OpenMP runtime that torch has loaded, and how its threads wait for one another."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

# At most this many idle threads are started to make the others sleep; more are not worth it.
MOST_IDLE = 64


@cache
def runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime of this process, with the signature of `GOMP_parallel` set; None if none is found."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in loaded.splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libgomp" in path or "/libomp" in path or "/libiomp" in path:
            found = ctypes.CDLL(path)
            found.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            found.GOMP_parallel.restype = None
            return found
    return None


class Waiting:
    """Switches the threads of the runtime between spinning for a while before they sleep, the initial state, and
    sleeping nearly at once.

    GCC's runtime reads the time to spin only once, when it is loaded. But while it has more threads than there are
    cores, its threads sleep nearly at once (GOMP_SPINCOUNT in gcc.gnu.org/onlinedocs/libgomp). So a second team of
    idle threads, which computes nothing, makes the others sleep.
    """

    def __init__(self) -> None:
        self._idle: threading.Thread | None = None
        self._num_idle = 0
        self._over = threading.Event()

    def can_sleep(self, threads: int) -> bool:
        """Whether a team of `threads`, at least 2, can be made to sleep, and spins otherwise."""
        found = runtime()
        return (
            found is not None
            and "libgomp" in found._name
            and "OMP_WAIT_POLICY" not in os.environ
            and _num_idle(found, threads) <= MOST_IDLE
        )

    def spin(self) -> None:
        """From now on threads spin."""
        if self._idle is not None:
            self._over.set()
            # The runtime counts the idle team's threads until their master ends.
            self._idle.join()
            self._idle, self._num_idle = None, 0

    def sleep(self, threads: int) -> None:
        """From now on a team of `threads` sleeps. Call only if `can_sleep(threads)`."""
        found = runtime()
        assert found is not None
        number = _num_idle(found, threads)
        if self._idle is not None and self._num_idle >= number:
            return
        self.spin()
        begun, self._over, self._num_idle = threading.Event(), threading.Event(), number
        # A harmless C function, since the idle threads are unknown to Python.
        nothing = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p)

        def wait(over: threading.Event) -> None:
            found.GOMP_parallel(nothing, None, number + 1, 0)
            begun.set()
            over.wait()

        self._idle = threading.Thread(target=wait, args=[self._over], name="idle", daemon=True)
        self._idle.start()
        begun.wait()


def _num_idle(found: ctypes.CDLL, threads: int) -> int:
    """The size, without its master, of the smallest idle team with which the runtime has more threads than cores."""
    return max(1, int(found.omp_get_num_procs()) - threads + 1)
