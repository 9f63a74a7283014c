"""Large columns of zeros, each in memory of its own from the operating system's kernel."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Smaller columns gain nothing by it and stay in the C library's heap.
_LEAST_BYTES = 2**20


def fresh_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """`np.zeros` whose pages take memory only when they are first written, and are returned with the array. Raises
    MemoryError like `np.zeros`.

    The manager keeps freed memory (`pagekv.common.freed_memory`), so the pools of a new epoch could get the memory of
    earlier ones, which `np.zeros` has to clear at once. How much the process grows would then depend on where the pools
    come to lie.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _LEAST_BYTES:
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for a column: {error.strerror}") from error
    return np.frombuffer(memory, dtype).reshape(shape)
