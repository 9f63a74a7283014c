"""Settings of glibc's allocator: how much freed memory it keeps, so that later buffers need no fresh pages, and in how
many heaps. With another C library the functions do nothing.

A fresh page costs up to 3 us in a virtual machine: 8 ms for the copies that gRPC makes of a message of 4 MiB, and a
quarter of a prefill's time.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest threshold that glibc accepts up to version 2.34, on 64-bit machines.
_MOST_BEFORE_2_35 = 32 * 2**20


def keep_freed_memory(num_bytes: int) -> None:
    """Lets the C library keep up to `num_bytes` of freed memory. By default it returns buffers of some hundred
    kilobytes to the kernel. malloc_trim still returns all of it; protobuf 7 calls it after each 10,000 messages that it
    freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Setting M_TRIM_THRESHOLD alone would make things worse: glibc would stop adapting M_MMAP_THRESHOLD to the sizes of
    # freed buffers.
    if mallopt(_MMAP_THRESHOLD, num_bytes) or mallopt(_MMAP_THRESHOLD, min(num_bytes, _MOST_BEFORE_2_35)):
        mallopt(_TRIM_THRESHOLD, num_bytes)


def give_back_freed_memory() -> None:
    """Returns the memory that the C library keeps to the kernel, which counts it as available from then on."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def share_heaps(most: int) -> None:
    """Lets the threads of this process share at most `most` heaps (arenas); to be called before they start. By default
    there are up to eight for each core. Memory that was freed in one heap cannot serve threads of another one, so each
    heap keeps as much as its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, most)


def touch_memory(num_bytes: int) -> None:
    """Allocates and frees `num_bytes`, so that the first large messages find freed memory as later ones do."""
    buffer = b"\1" * num_bytes
    del buffer
