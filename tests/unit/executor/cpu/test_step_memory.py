"""Memory of a step is touched before the step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from support.clients.stack import environment

from pagekv.executor.cpu.step_memory import MOST_BYTES, PIECE_BYTES, StepMemory

# Prints the fresh pages of a worker thread that takes 80 MiB in buffers of 10: where 1 MiB was prepared, and where 100
# were, each in a process of its own, forked from one that has imported torch.
CODE = """
import os
import resource
import sys
import threading
from pagekv.common.freed_memory import keep_freed_memory, share_heaps

# Before any thread has a heap.
share_heaps(1)
keep_freed_memory(2**30)

import torch
from pagekv.executor.cpu.step_memory import StepMemory

def step(num_bytes=10 * 2**20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [torch.empty(num_bytes, dtype=torch.uint8).zero_() for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work(prepared):
    memory = StepMemory(prepared * 2**20)
    while memory.prepare():
        pass
    step(1)  # pages of torch's own, which a forked process copies when it first writes to them
    print(step())

torch.set_num_threads(1)
assert threading.active_count() == 1
for prepared in (1, 100):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    worker = threading.Thread(target=work, args=[prepared])
    worker.start()
    worker.join()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give freed memory back")
def test_the_first_step_takes_fresh_pages_only_where_none_were_prepared() -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    few, many = map(int, done.stdout.split())
    # Pages may be of 4 KiB or, where the system gives huge ones, of 2 MiB.
    assert few >= 40
    assert many < few / 4


def test_it_is_written_a_piece_at_a_time() -> None:
    memory = StepMemory(2 * PIECE_BYTES + 1)
    assert [memory.prepare() for _ in range(4)] == [True, True, False, False]


def test_a_large_one_is_written_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda size, dtype: torch.empty(0))
    memory, pieces = StepMemory(2 * MOST_BYTES), 1
    while memory.prepare():
        pieces += 1
    assert pieces == MOST_BYTES // PIECE_BYTES


def test_without_memory_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    memory = StepMemory(3 * PIECE_BYTES)
    monkeypatch.setattr(torch, "zeros", none_left)
    assert not memory.prepare()
    assert not memory.prepare()


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES])
def test_a_small_one_is_written_at_once(num_bytes: int) -> None:
    assert not StepMemory(num_bytes).prepare()


def test_a_step_that_comes_ends_it() -> None:
    memory = StepMemory(3 * PIECE_BYTES)
    assert memory.prepare()
    memory.leave()
    assert not memory.prepare()
