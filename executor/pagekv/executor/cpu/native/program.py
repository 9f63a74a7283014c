"""Calls of compiled functions that are recorded once and then run as one: no Python between the calls, and one parallel
region for all of them, in which threads meet at barriers.

A step of few rows makes some sixty calls, with a few microseconds of work each. Calling them from Python took as long
as that work, and longer while another thread of the process wanted the interpreter.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagekv.executor.cpu.native import openmp
from pagekv.executor.cpu.native.intrinsics import call, pointer, take_ticket
from pagekv.executor.cpu.native.numbers import address_of
from pagekv.executor.cpu.native.openmp import Recorder
from pagekv.executor.cpu.openmp_runtime import runtime


class Program(Recorder):
    """A list of calls. It is recorded once, within `recorded`; then it runs any number of times, on the memory that it
    was recorded with and by as many threads.

    Calls are recorded in parts, such as the layers of a model, which use the same memory one after the other. A part
    may read only one result of the part before: the one whose memory was taken last.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._calls: list[tuple[int, Any, bool]] = []
        # Tensors of the caller that calls read and write; and memory of this object, which every part uses again from
        # the first tensor on.
        self._held: list[torch.Tensor] = []
        self._memory: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._taken: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        # The tensor that was taken last; and the last tensor of the part before, which this part may still read.
        self._last: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._table = np.zeros((0, 3), np.int64)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within this context, calls are recorded and not made."""
        openmp.recorder = self
        try:
            yield
        finally:
            openmp.recorder = None
        self._table = np.array([(at, ctypes.addressof(packed), alone) for at, packed, alone in self._calls], np.int64)

    def next_part(self) -> None:
        """Begins a new part with the calls that follow."""
        self._taken.clear()
        self._before = self._last

    def add(self, function: int, packed: Any, alone: bool, held: tuple[torch.Tensor, ...]) -> None:
        self._calls.append((function, packed, alone))
        self._held += held

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = shape, dtype
        memory = self._memory.setdefault(key, [])
        while True:
            number = self._taken[key]
            self._taken[key] += 1
            if number == len(memory):
                memory.append(torch.empty(shape, dtype=dtype))
            if memory[number] is not self._before:
                self._last = memory[number]
                return memory[number]

    def run(self) -> None:
        """Makes the calls. Raises RuntimeError if torch has another number of threads than while recording."""
        if torch.get_num_threads() != self._threads:
            raise RuntimeError(f"recorded for {self._threads} threads, run by {torch.get_num_threads()}")
        found = runtime() if self._threads > 1 else None
        barrier = 0 if found is None else ctypes.cast(found.GOMP_barrier, ctypes.c_void_p).value or 0
        openmp.run(_all_calls(), (len(self._table), self._table.ctypes.data, barrier), alone=found is None)


@cache
def _all_calls() -> int:
    def work(raw: Any) -> None:
        args = carray(raw, 4, np.int64)
        calls = carray(pointer(args[2]), (args[1], 3), np.int64)
        # The second ticket is the number of the thread.
        thread = take_ticket(args[0] + 8)
        for number in range(args[1]):
            if calls[number, 2] == 0 or thread == 0:
                call(calls[number, 0], calls[number, 1])
            if args[3] != 0:
                call(args[3], 0)
            if thread == 0:
                # All threads have finished the call, so its tickets can begin at 0 again for the next run.
                tickets = carray(pointer(carray(pointer(calls[number, 1]), 1, np.int64)[0]), 2, np.int64)
                tickets[0] = 0
                tickets[1] = 0

    return address_of(work)
