"""Host memory for large pools that are page-locked afterwards: on huge pages if the system allows it, and touched by
all cores before it is locked. If untouched memory is locked, the driver faults it in by one thread, 4 KiB at a time.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 * 2**20
# Bytes that a thread touches at a time.
SHARE = 64 * HUGE_PAGE


def host_memory(num_bytes: int) -> Bytes:
    """[num_bytes] zeros, all present, from a multiple of HUGE_PAGE on; returned to the system when the last reference
    is gone. Raises MemoryError.
    """
    try:
        # Private: shared memory has huge pages by another setting, which is off on most systems.
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes of host memory: {error}") from error
    with suppress(OSError, AttributeError):  # a kernel without huge pages, a system without madvise: small ones will do
        memory.madvise(mmap.MADV_HUGEPAGE)
    every = np.frombuffer(memory, np.uint8)
    found = every[-every.ctypes.data % HUGE_PAGE :][:num_bytes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for _ in threads.map(_touch, (found[first : first + SHARE] for first in range(0, num_bytes, SHARE))):
            pass
    return found


def _touch(share: Bytes) -> None:
    """Writes a byte of each small page, in case that there are no huge pages."""
    share[:: mmap.PAGESIZE] = 0
