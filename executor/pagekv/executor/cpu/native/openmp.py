"""Runs a compiled function on the threads that torch's own operators run on.

A second pool of threads would wait for work while torch's computes, and each would take the cores from the other. So
the function goes to the OpenMP runtime that torch has loaded, by the entry that a compiler calls for a parallel region
(libgomp ABI, gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html; LLVM's runtime has it as well).
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
    """Takes calls down instead of `run`."""

    def add(self, function: int, packed: Any, alone: bool, held: tuple[torch.Tensor, ...]) -> None:
        """A call of the function with packed arguments; `held` has to be kept."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for calls."""
        ...


# Set for a while by a program, on the one thread that computes.
recorder: Recorder | None = None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory for what calls compute."""
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


def run(function: int, arguments: Sequence[int], *, alone: bool = False, held: tuple[torch.Tensor, ...] = ()) -> None:
    """Calls the function at an address, `void (int64_t *)`, once on each of torch's threads, or once, and waits. It is
    handed the address of two tickets, both 0 at first, and then `arguments`; `held` has those tensors whose addresses
    are among them and which nothing else keeps. While there is a recorder, it takes the call down.
    """
    # Of ctypes, since NumPy takes as long to tell an array's address as this takes in all.
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
    """The bits of a float32, as an argument that `float_of_bits` takes."""
    bits: int = struct.unpack("i", struct.pack("f", number))[0]
    return bits
