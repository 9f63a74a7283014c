"""Compiled functions on torch's threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from pagekv.executor.cpu.native import openmp
from pagekv.executor.cpu.native.intrinsics import pointer, take_ticket
from pagekv.executor.cpu.native.numbers import address_of
from pagekv.executor.cpu.native.openmp import bits_of, run


def work(raw: Any) -> None:
    """Counts the calls, and says by item which of them took it."""
    args = carray(raw, 4, np.int64)
    taken = carray(pointer(args[1]), args[2], np.int64)
    thread = take_ticket(args[0] + 8)
    take_ticket(args[3])
    while True:
        item = take_ticket(args[0])
        if item >= args[2]:
            return
        taken[item] += thread + 1


def counted(items: int, *, alone: bool = False) -> tuple[int, list[int]]:
    """Calls, and by item the number, from 1, of the call that took it."""
    calls, taken = np.zeros(1, np.int64), np.zeros(items, np.int64)
    run(address_of(work), (taken.ctypes.data, items, calls.ctypes.data), alone=alone)
    return int(calls[0]), taken.tolist()


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_every_thread_is_called_and_every_item_taken_once(threads: int) -> None:
    calls, taken = counted(10_000)
    assert calls == threads
    assert {*taken} <= {1, 2, 3}
    assert 0 not in taken


def test_alone(threads: int) -> None:
    assert counted(100, alone=True) == (1, [1] * 100)


def test_without_a_runtime_one_thread_does_it_all(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    assert counted(100) == (1, [1] * 100)


def test_bits_of_a_number() -> None:
    for number in (0.0, 1e-5, -3.25):
        assert bits_of(number) == np.float32(number).view(np.int32)
