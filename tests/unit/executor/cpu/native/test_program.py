"""Calls that are recorded once: they are made in order, by all threads, as often as the program runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from pagekv.executor.cpu.native import openmp, program
from pagekv.executor.cpu.native.intrinsics import pointer, take_ticket
from pagekv.executor.cpu.native.numbers import address_of
from pagekv.executor.cpu.native.openmp import empty, run
from pagekv.executor.cpu.native.program import Program

ITEMS = 1000


def double(raw: Any) -> None:
    """out[i] = 2 * of[ITEMS - 1 - i]: an item needs what another thread may have computed in the call before."""
    args = carray(raw, 3, np.int64)
    of, out = carray(pointer(args[1]), ITEMS, np.int64), carray(pointer(args[2]), ITEMS, np.int64)
    take_ticket(args[0] + 8)
    while True:
        item = take_ticket(args[0])
        if item >= ITEMS:
            return
        out[item] = 2 * of[ITEMS - 1 - item]


def doubled(of: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
    out = empty(ITEMS, dtype=torch.int64)
    run(address_of(double), (of.data_ptr(), out.data_ptr()), alone=alone, held=(of, out))
    return out


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def recorded(first: torch.Tensor, parts: int) -> tuple[Program, torch.Tensor]:
    """Three calls a part, of which one is made by one thread."""
    made = Program()
    found = first
    with made.recorded():
        for _ in range(parts):
            made.next_part()
            found = doubled(doubled(doubled(found), alone=True))
    return made, found


def test_calls_are_made_in_order_each_time(threads: int) -> None:
    first = torch.arange(ITEMS)
    made, last = recorded(first, 5)
    for added in range(20):
        first.copy_(torch.arange(ITEMS) + added)
        last.fill_(-1)
        made.run()
        assert torch.equal(last, 2**15 * (torch.arange(ITEMS) + added).flip(0))


def test_nothing_is_computed_while_recording_and_calls_are_made_at_once_afterwards() -> None:
    first = torch.zeros(ITEMS, dtype=torch.int64)
    _, last = recorded(first, 1)
    last.fill_(7)
    assert (last == 7).all()
    assert not doubled(first).any()


def test_parts_compute_in_the_same_memory(threads: int) -> None:
    """But for what was taken last before, which they may read to their end."""
    made, _ = recorded(torch.arange(ITEMS), 5)
    (memory,) = made._memory.values()
    assert len(memory) == 4


def test_memory_is_taken_by_shape_and_type_once_in_a_part() -> None:
    made = Program()
    with made.recorded():
        first, second, other = empty(4), empty(4), empty(4, dtype=torch.int64)
        assert len({first.data_ptr(), second.data_ptr(), other.data_ptr()}) == 3
        made.next_part()
        again = [empty(5), empty(4), empty(4, dtype=torch.int64), empty(4)]
        # That of the type taken last is another one.
        assert [again[1].data_ptr(), again[3].data_ptr()] == [first.data_ptr(), second.data_ptr()]
        assert again[2].data_ptr() != other.data_ptr()


def test_recording_that_fails_ends() -> None:
    with pytest.raises(ZeroDivisionError), Program().recorded():
        raise ZeroDivisionError
    assert openmp.recorder is None


def test_another_number_of_threads_is_refused() -> None:
    before = torch.get_num_threads()
    made, _ = recorded(torch.arange(ITEMS), 1)
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(RuntimeError, match=f"recorded for {before} threads, run by {before + 1}"):
            made.run()
    finally:
        torch.set_num_threads(before)


def test_without_a_runtime_one_thread_makes_all_calls(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    monkeypatch.setattr(program, "runtime", lambda: None)
    made, last = recorded(torch.arange(ITEMS), 3)
    made.run()
    assert torch.equal(last, 2**9 * torch.arange(ITEMS).flip(0))
