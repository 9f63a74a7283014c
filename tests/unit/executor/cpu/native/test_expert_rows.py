"""Rows sorted by expert, and summed by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from pagekv.executor.cpu.native import expert_rows
from pagekv.executor.cpu.native.expert_rows import gate_activation, rows_by_expert, weighted_sums
from pagekv.executor.cpu.native.openmp import run
from pagekv.executor.cpu.native.vectors import vector_lanes

pytestmark = pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")


# One row, which one thread sorts, and more than it does alone; more experts than rows, and fewer.
@pytest.mark.parametrize(("count", "choices", "experts", "size"), [(1, 2, 8, 24), (700, 4, 16, 96), (9, 1, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_expert_by_expert_and_are_found_again(
    dtype: torch.dtype, count: int, choices: int, experts: int, size: int
) -> None:
    torch.manual_seed(count)
    rows, chosen = torch.randn(count, size).to(dtype), torch.randint(0, experts, (count, choices))
    found, places, bounds = rows_by_expert(rows, chosen, experts)
    # A row's place before that of later rows of its expert.
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(found, rows[order // choices])
    assert torch.equal(places[order], torch.arange(count * choices))
    assert [end - begin for begin, end in bounds] == chosen.flatten().bincount(minlength=experts).tolist()
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]

    weights = torch.rand(count, choices)
    summed = weighted_sums(found, places, weights)
    expected = (rows.double() * weights.double().sum(1, keepdim=True)).to(dtype)
    assert summed.dtype == dtype
    torch.testing.assert_close(summed, expected)


def test_threads_do_not_share_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows, and several times, so that several threads are at work at the same time. No thread writes beyond the
    memory.
    """
    count, size, before = 16_000, 96, torch.get_num_threads()
    found, places = torch.randn(2 * count, size), torch.randperm(2 * count)
    weights, guards = torch.rand(count, 2), list[torch.Tensor]()

    def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        memory = torch.full((math.prod(shape) + 4 * size,), 7.0, dtype=dtype)
        guards.append(memory[math.prod(shape) :])
        return memory[: math.prod(shape)].view(shape)

    monkeypatch.setattr(expert_rows, "empty", guarded)
    torch.set_num_threads(3)
    try:
        for _ in range(30):
            guards.clear()
            summed = weighted_sums(found, places, weights)
            assert len(guards) == 2
            assert all(guard.eq(7).all() for guard in guards)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(summed, (found[places].view(count, 2, size) * weights[..., None]).sum(1))


def test_an_expert_out_of_bounds_is_written_nowhere() -> None:
    chosen, ends, places = torch.tensor([0, 4]), torch.tensor([0, 0, 0, 0, 7]), torch.tensor([-1, -1])
    arguments = (chosen.data_ptr(), len(chosen), 4, ends.data_ptr(), places.data_ptr())
    run(expert_rows._places(), arguments, alone=True, held=(chosen, ends, places))
    assert ends[4] == 7
    assert places.tolist() == [-1, -1]


def test_a_sort_writes_nothing_beyond_its_memory() -> None:
    """The last values are beyond."""
    chosen, ends, places = torch.tensor([3, 0, 3, 2]), torch.tensor([0, 0, 0, 0, 7]), torch.tensor([-1, -1, -1, 7])
    arguments = (chosen.data_ptr(), 3, 4, ends.data_ptr(), places.data_ptr())
    run(expert_rows._places(), arguments, alone=True, held=(chosen, ends, places))
    assert ends.tolist() == [1, 1, 1, 3, 7]
    assert places.tolist() == [1, 0, 2, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thread_that_sums_alone_writes_nothing_beyond_its_memory(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With several threads, each would write into the sums of the next."""
    guards: list[torch.Tensor] = []

    def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # Other values in each, in case one is copied to another.
        memory = torch.arange(math.prod(shape) + 8).to(dtype) + 50 * len(guards)
        guards.append(memory[-8:])
        return memory[:-8].view(shape)

    monkeypatch.setattr(expert_rows, "empty", guarded)
    found, places, weights = torch.randn(6, 5).to(dtype), torch.randperm(6), torch.rand(3, 2)
    summed = weighted_sums(found, places, weights)
    expected = (found[places].double().view(3, 2, 5) * weights[..., None]).sum(1).to(dtype)
    torch.testing.assert_close(summed, expected)
    assert [guard.tolist() for guard in guards] == [[*range(15, 23)], [*range(55, 63)]]


@pytest.mark.parametrize("size", [3, 48])
@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (lambda gate, up: functional.silu(gate) * up, "silu"),
        (lambda gate, up: functional.gelu(gate, approximate="tanh") * up, "gelu_tanh"),
        (lambda gate, up: gate * functional.silu(up), None),
        (lambda gate, up: functional.gelu(gate) * up, None),
        (lambda gate, up: functional.silu(gate.clamp(max=7)) * up, None),
        (lambda gate, up: functional.silu(gate) * up.clamp(-50, 50), None),
    ],
)
def test_gates_are_known_by_what_they_compute(
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], expected: str | None, size: int
) -> None:
    experts = SimpleNamespace(has_gate=True, is_transposed=False, down_proj=torch.empty(2, 16, size))
    experts._apply_gate = lambda both: gate(*both.chunk(2, -1))
    assert gate_activation(experts) == expected
    experts.has_gate = False
    assert gate_activation(experts) is None
