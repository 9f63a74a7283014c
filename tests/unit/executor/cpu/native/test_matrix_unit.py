"""Products by the processor's matrix unit, beside oneDNN, which uses it too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native import matrix_unit
from pagekv.executor.cpu.native.bfloat16_sums import bfloat16_sums
from pagekv.executor.cpu.native.matrix_unit import (
    PAIRS,
    ROWS,
    SHAPES_BYTES,
    has_matrix_unit,
    keep_shapes,
    restore_shapes,
    set_shapes,
)
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.tile import BFLOAT16_MATRIX
from pagekv.executor.cpu.native.vectors import vector_lanes
from pagekv.executor.cpu.products import TorchProduct

needs_the_unit = pytest.mark.skipif(not has_matrix_unit(), reason="this processor has no matrix unit for bfloat16")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    has_matrix_unit.cache_clear()
    yield
    has_matrix_unit.cache_clear()


@pytest.mark.parametrize(
    ("named", "leave", "found"),
    [
        ("amx-tile amx-bf16", True, True),
        ("amx-tile amx-bf16", False, False),
        ("amx-tile amx-int8", True, False),
        ("amx-bf16", True, False),
    ],
)
def test_there_is_a_unit_where_code_and_kernel_know_it(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, named: str, leave: bool, found: bool
) -> None:
    monkeypatch.setattr(matrix_unit, "features", lambda: frozenset(named.split()))
    monkeypatch.setattr("torch.cpu._init_amx", lambda: leave)
    assert has_matrix_unit() is found


@needs_the_unit
@pytest.mark.skipif(vector_lanes() != 16, reason="panels have the width of four tiles with AVX-512 alone")
def test_products_of_bfloat16_are_the_units() -> None:
    assert bfloat16_sums() == BFLOAT16_MATRIX


@needs_the_unit
@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5, 600])
def test_one_dnn_computes_the_same_before_and_behind(count: int) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(130, 96).bfloat16(), torch.randn(count, 96).bfloat16()
    ours, theirs = Product(weight, None), TorchProduct(weight, None)
    before = theirs(rows)
    found = ours(rows)
    assert torch.equal(theirs(rows), before)
    assert torch.equal(ours(rows), found)
    assert torch.allclose(found, before, rtol=1e-2, atol=1e-2)


@njit
def shapes_in_turn(rows: int, depth: int, place: int) -> None:
    """Writes one behind the other: those before, those for rows of so many pairs, and those when all is over."""
    keep_shapes(place)
    set_shapes(rows, depth, place + 3 * 64)
    keep_shapes(place + 64)
    restore_shapes(place)
    keep_shapes(place + 2 * 64)


@needs_the_unit
@pytest.mark.parametrize("rows", [1, 7, ROWS])
@pytest.mark.parametrize("depth", [PAIRS, 3 * PAIRS + 5, 2])
def test_shapes_are_those_of_the_rows_and_then_those_of_before(rows: int, depth: int) -> None:
    room = np.full((4, SHAPES_BYTES), 255, np.uint8)
    shapes_in_turn(rows, depth, room.ctypes.data)
    before, during, after, _ = room
    assert (before == after).all()
    assert during[0] == 1
    rest = depth % PAIRS or PAIRS
    # Sums and the left side, the right side, and both for the pairs left over.
    assert during[48:56].tolist() == [*[rows] * 5, PAIRS, rows, rest]
    assert during[16:32].view(np.uint16).tolist() == [*[64] * 6, 4 * rest, 64]


@njit
def take_shapes(rows: int, depth: int, place: int) -> None:
    set_shapes(rows, depth, place)


@njit
def read_shapes(place: int) -> None:
    keep_shapes(place)


@njit
def end_shapes(place: int) -> None:
    """A description of zeros ends the use of the unit."""
    restore_shapes(place)


@needs_the_unit
@pytest.mark.parametrize("count", [5, 2 * ROWS])
def test_a_product_leaves_a_thread_the_shapes_that_it_had(count: int) -> None:
    multiply, rows = Product(torch.ones(8, 96).bfloat16(), None), torch.ones(count, 96).bfloat16()
    taken, left, none = np.zeros((3, SHAPES_BYTES), np.uint8)
    # Compiled, and so few rows that this thread computes alone.
    multiply(rows)
    read_shapes(left.ctypes.data)
    take_shapes(11, 2 * PAIRS + 3, taken.ctypes.data)
    multiply(rows)
    read_shapes(left.ctypes.data)
    end_shapes(none.ctypes.data)
    assert taken.any()
    assert left.tolist() == taken.tolist()
