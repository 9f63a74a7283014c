"""Runs a compiled function on the threads that torch's own operators run on.

A second pool of threads would wait for work while torch's computes, and each would take the cores from the other. So
the function goes to the OpenMP runtime that torch has loaded, by the entry that a compiler calls for a parallel region
(libgomp ABI, gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html; LLVM's runtime has it as well).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch


@cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime of this process; None where torch has none that can be found."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in loaded.splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libgomp" in path or "/libomp" in path or "/libiomp" in path:
            runtime = ctypes.CDLL(path)
            runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            runtime.GOMP_parallel.restype = None
            return runtime
    return None


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_alone(function: int, arguments: npt.NDArray[np.int64]) -> None:
    """Calls the function at an address, `void (int64_t *arguments)`."""
    _Function(function)(arguments.ctypes.data)


def run_parallel(function: int, arguments: npt.NDArray[np.int64]) -> None:
    """Calls the function at an address, `void (int64_t *arguments)`, once on each of torch's threads, and waits."""
    threads = torch.get_num_threads()
    runtime = _runtime() if threads > 1 else None
    if runtime is not None:
        runtime.GOMP_parallel(function, arguments.ctypes.data, threads, 0)
    else:
        run_alone(function, arguments)
