"""Freed memory that the C library keeps, where that library is glibc, so that the next buffers need no fresh pages, and
how many heaps it keeps it in.

A fresh page costs up to 3 us in a virtual machine: 8 ms for the copies that gRPC makes of a message of 4 MiB, and a
quarter of a prefill's time.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest threshold that glibc takes up to version 2.34, on machines of 64 bits.
_MOST_BEFORE_2_35 = 32 * 2**20


def keep_freed_memory(num_bytes: int) -> None:
    """Lets the C library keep up to `num_bytes` of freed memory. By default buffers of some hundred kilobytes go back
    to the kernel. A call of malloc_trim gives all of it back: protobuf 7 makes one after each 10,000 messages that it
    freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # A threshold for trimming alone would make it worse: it ends the other one's adaptation to what is freed.
    if mallopt(_MMAP_THRESHOLD, num_bytes) or mallopt(_MMAP_THRESHOLD, min(num_bytes, _MOST_BEFORE_2_35)):
        mallopt(_TRIM_THRESHOLD, num_bytes)


def give_back_freed_memory() -> None:
    """Gives what the C library has kept back to the kernel, which counts it as available from then on."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def share_heaps(most: int) -> None:
    """Lets the threads of this process share so many heaps (arenas); to be called before they are started. By default
    there are up to eight for each core, and what was freed in one serves no thread of another: each keeps as much as
    its worst moment took.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, most)


def touch_memory(num_bytes: int) -> None:
    """Takes and frees so much memory: the first large messages then find what the ones after them would."""
    buffer = b"\1" * num_bytes
    del buffer
