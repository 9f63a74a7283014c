"""Runs a compiled function on the threads that torch's own operators run on.

A second pool of threads would wait for work while torch's computes, and each would take the cores from the other. So
the function goes to the OpenMP runtime that torch has loaded, by the entry that a compiler calls for a parallel region
(libgomp ABI, gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html; LLVM's runtime has it as well).
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from pagekv.executor.cpu.openmp_runtime import runtime

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_alone(function: int, arguments: npt.NDArray[np.int64]) -> None:
    """Calls the function at an address, `void (int64_t *arguments)`."""
    _Function(function)(arguments.ctypes.data)


def run_parallel(function: int, arguments: npt.NDArray[np.int64]) -> None:
    """Calls the function at an address, `void (int64_t *arguments)`, once on each of torch's threads, and waits."""
    threads = torch.get_num_threads()
    found = runtime() if threads > 1 else None
    if found is not None:
        found.GOMP_parallel(function, arguments.ctypes.data, threads, 0)
    else:
        run_alone(function, arguments)
