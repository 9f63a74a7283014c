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
from pagekv.executor.cpu.native.openmp import run_alone, run_parallel


def work(raw: Any) -> None:
    """Counts the calls behind the ticket, and the items that each call takes."""
    args = carray(raw, 3, np.int64)
    taken = carray(pointer(args[1]), args[2], np.int64)
    thread = take_ticket(args[0] + 8)
    while True:
        item = take_ticket(args[0])
        if item >= args[2]:
            return
        taken[item] += thread + 1


def run(how: Any, items: int) -> tuple[int, list[int]]:
    """Calls, and by item the number, from 1, of the call that took it."""
    tickets, taken = np.zeros(2, np.int64), np.zeros(items, np.int64)
    how(address_of(work), np.array([tickets.ctypes.data, taken.ctypes.data, items], np.int64))
    return int(tickets[1]), taken.tolist()


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_every_thread_is_called_and_every_item_taken_once(threads: int) -> None:
    calls, taken = run(run_parallel, 10_000)
    assert calls == threads
    assert {*taken} <= {1, 2, 3}
    assert 0 not in taken


def test_alone(threads: int) -> None:
    assert run(run_alone, 100) == (1, [1] * 100)


def test_without_a_runtime_one_thread_does_it_all(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    assert run(run_parallel, 100) == (1, [1] * 100)
