"""Host memory to be page-locked: there, where it should be, and gone when it is freed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pagekv.kernels import host_memory as module
from pagekv.kernels.host_memory import HUGE_PAGE, SHARE, host_memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE - 1, SHARE + 12345])
def test_memory_is_zero_aligned_and_writable(size: int) -> None:
    memory = host_memory(size)
    assert (memory.shape, memory.dtype.name, memory.ctypes.data % HUGE_PAGE) == ((size,), "uint8", 0)
    assert not memory.any()
    memory[-1] = 7
    assert memory.sum() == 7


@pytest.mark.parametrize("forbidden", [False, True])
def test_memory_is_there_at_once_and_goes_back(forbidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With huge pages or, where the system forbids them, without."""
    size = SHARE

    class Small(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    if forbidden:
        monkeypatch.setattr(mmap, "mmap", Small)
    before = resident()
    pool = torch.from_numpy(host_memory(size)).view(torch.float16).view(4, -1)
    assert resident() - before > 0.98 * size
    part = pool[2:]
    del pool
    assert resident() - before > 0.98 * size
    del part
    assert resident() - before < 0.1 * size


def test_threads_touch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each its own part, all of it, whatever the number of threads."""
    touched: list[int] = []
    monkeypatch.setattr(module, "_touch", lambda share: touched.append(len(share)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    host_memory(2 * SHARE + 5)
    assert sorted(touched) == [5, SHARE, SHARE]


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"^\d+ bytes of host memory: "):
        host_memory(2**60)
