"""Runs a compiled function on the threads that torch's own operators run on.

Two pools of threads would take the cores from each other: the threads of one spin while they wait for work, when those
of the other compute. So the function goes to the OpenMP runtime that torch has loaded, through the entry point that
compilers use for a parallel region (libgomp ABI,
gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html; LLVM's runtime has it as well).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from pagekv.executor.cpu.openmp_runtime import runtime

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Recorder(Protocol):
    """Receives the calls of `run`, which are then recorded and not made."""

    def add(self, function: int, packed: Any, alone: bool, held: tuple[torch.Tensor, ...]) -> None:
        """Records a call: the function's address, its array of arguments, whether one thread makes the call, and the
        tensors to keep alive.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for the results of recorded calls."""
        ...


# Set by a `Program` while it records. Only one thread of the process computes steps.
recorder: Recorder | None = None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialised memory for the results of calls: the recorder's, while there is one."""
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


def run(function: int, arguments: Sequence[int], *, alone: bool = False, held: tuple[torch.Tensor, ...] = ()) -> None:
    """Calls the function `void (int64_t *)` at an address on each of torch's threads, or on one if `alone`, and waits.
    The function gets an array: the address of two tickets, both 0 at first, and then `arguments`. `held`: tensors whose
    addresses are among the arguments and that nothing else keeps alive. While there is a recorder, the call is recorded
    and not made.
    """
    # An array of ctypes: NumPy takes as long to tell an array's address as this function takes in all.
    packed = (ctypes.c_int64 * (len(arguments) + 3))(0, *arguments)
    packed[0] = ctypes.addressof(packed) + 8 * (len(arguments) + 1)
    if recorder is not None:
        recorder.add(function, packed, alone, held)
        return
    threads = 1 if alone else torch.get_num_threads()
    found = runtime() if threads > 1 else None
    if found is not None:
        found.GOMP_parallel(function, packed, threads, 0)
    else:
        _Function(function)(packed)


@cache
def bits_of(number: float) -> int:
    """The bits of a number as float32: an argument that the function turns back by `float_of_bits`."""
    bits: int = struct.unpack("i", struct.pack("f", number))[0]
    return bits
