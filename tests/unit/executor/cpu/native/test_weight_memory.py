"""Memory that weights share: aligned, apart from each other, and given back."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest
import torch
from support.clients.stack import environment

from pagekv.executor.cpu.native.weight_memory import PIECE_BYTES, WeightMemory

# Frees 256 MiB of ones as the executor does while it loads a model, and prints what a weight behind them finds.
REUSED = """
from pagekv.common.freed_memory import keep_freed_memory, share_heaps
share_heaps(1)
keep_freed_memory(2**30)
import torch
from pagekv.executor.cpu.native.weight_memory import PIECE_BYTES, WeightMemory
loaded = torch.ones(4 * PIECE_BYTES, dtype=torch.uint8)
begin = loaded.data_ptr()
del loaded
found = [WeightMemory().take(count, torch.uint8) for count in (64, PIECE_BYTES)]
assert all(begin <= each.data_ptr() < begin + 4 * PIECE_BYTES for each in found), "the memory is not reused"
print([bool(each.any()) for each in found], [each.data_ptr() % 2**21 for each in found])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give freed memory back")
def test_memory_that_was_freed_before_comes_without_its_small_pages() -> None:
    """Only pages that are not there yet can be large ones. Fresh pages are zeros."""
    command = [sys.executable, "-c", REUSED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "[False, False] [0, 0]", done.stderr


def test_weights_are_aligned_and_lie_apart() -> None:
    memory = WeightMemory()
    taken = [memory.take(count, dtype) for count in (1, 1000, 4097) for dtype in (torch.bfloat16, torch.float32)]
    for number, each in enumerate(taken):
        assert each.data_ptr() % 64 == 0
        each.fill_(number)
    assert [each.unique().tolist() for each in taken] == [[number] for number in range(len(taken))]


def test_small_weights_follow_each_other_within_a_piece() -> None:
    memory = WeightMemory()
    first, second = (memory.take(100, torch.float32) for _ in range(2))
    assert second.data_ptr() == first.data_ptr() + 448


def test_a_weight_that_does_not_fit_begins_a_piece() -> None:
    memory = WeightMemory()
    quarter = PIECE_BYTES // 4
    taken = [memory.take(quarter, torch.uint8) for _ in range(5)]
    for number, each in enumerate(taken):
        each.fill_(number)
    pieces = {each.untyped_storage().data_ptr() for each in taken}
    assert len(pieces) == 2
    assert [each[-1].item() for each in taken] == [0, 1, 2, 3, 4]


def test_a_large_weight_has_memory_of_its_own() -> None:
    memory = WeightMemory()
    small, large, behind = (memory.take(count, torch.uint8) for count in (64, PIECE_BYTES // 4 + 1, 64))
    assert len(large.untyped_storage()) <= PIECE_BYTES // 4 + 65
    assert behind.data_ptr() == small.data_ptr() + 64


def test_a_piece_goes_with_the_last_of_its_weights() -> None:
    memory = WeightMemory()
    first, second = memory.take(PIECE_BYTES // 4, torch.uint8), memory.take(PIECE_BYTES // 4, torch.uint8)
    piece = weakref.ref(first.untyped_storage())
    del first, memory
    gc.collect()
    second.fill_(7)
    assert second.sum().item() == 7 * len(second)
    del second
    gc.collect()
    assert piece() is None
