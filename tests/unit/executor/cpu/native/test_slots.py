"""Scores and weighed sums over slots, alone, against the same in NumPy, with vectors of several lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native.slots import lanes_of, score_slots, weigh_slots
from pagekv.executor.cpu.native.vectors import vector_lanes

SLOTS, APART = 5, 7
# Lanes, elements of a head, queries: one chunk of rows; more rows and more columns than registers take.
SHAPES = ((4, 8, 2), (2, 6, 3), (1, 3, 1), (4, 80, 6))
CASES = (*((torch.float32, *shape) for shape in SHAPES), (torch.bfloat16, *SHAPES[0]))


def compiled(loop: Any, lanes: int, size: int, members: int, width: int) -> Callable[..., None]:
    """Six numbers that both loops take, and the last of `score_slots`, behind which nothing is fetched."""
    if loop is score_slots:

        @njit
        def scores(stored: int, apart: int, query: int, found: int, row: int, most: int) -> None:
            score_slots(lanes, size, members, width, stored, apart, SLOTS, query, found, row, most, stored, 0)

        return scores  # type: ignore[no-any-return]  # Numba has no types

    @njit
    def weigh(stored: int, apart: int, weights: int, row: int, out: int) -> None:
        weigh_slots(lanes, size, members, width, stored, apart, SLOTS, weights, row, out, stored, 0)

    return weigh  # type: ignore[no-any-return]  # Numba has no types


def room(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots that are further apart than a head is long; what is between them is no number."""
    stored = torch.full((SLOTS, size + APART), math.nan, dtype=dtype)
    stored[:, :size] = torch.randn(SLOTS, size)
    return stored


@pytest.mark.parametrize(("dtype", "lanes", "size", "members"), CASES)
def test_scores_and_the_largest(dtype: torch.dtype, lanes: int, size: int, members: int) -> None:
    torch.manual_seed(0)
    stored, query = room(size, dtype), torch.randn(members, size)
    found, most = np.full((members, SLOTS + 2), 7, np.float32), np.full(members, -np.inf, np.float32)
    most[0] = 1e6
    score = compiled(score_slots, lanes, size, members, stored.element_size())
    places = found.ctypes.data, found.strides[0], most.ctypes.data
    score(stored.data_ptr(), stored.stride(0) * stored.element_size(), query.data_ptr(), *places)
    expected = (query.double() @ stored[:, :size].double().T).numpy()
    assert np.allclose(found[:, :SLOTS], expected, rtol=1e-5, atol=1e-5)
    assert (found[:, SLOTS:] == 7).all()
    assert most[0] == 1e6
    assert np.array_equal(most[1:], found[1:, :SLOTS].max(1))


def test_a_score_that_is_no_number_is_not_the_largest() -> None:
    stored, query = torch.ones(SLOTS, 8), torch.ones(1, 8)
    stored[2, 3] = math.nan
    found, most = np.zeros((1, SLOTS), np.float32), np.full(1, -np.inf, np.float32)
    compiled(score_slots, 4, 8, 1, 4)(stored.data_ptr(), 32, query.data_ptr(), found.ctypes.data, 0, most.ctypes.data)
    assert np.isnan(found[0]).tolist() == [False, False, True, False, False]
    assert most[0] == 8


@pytest.mark.parametrize(("dtype", "lanes", "size", "members"), CASES)
def test_values_are_weighed_and_added(dtype: torch.dtype, lanes: int, size: int, members: int) -> None:
    torch.manual_seed(0)
    stored, weights = room(size, dtype), np.random.default_rng(0).random((members, SLOTS + 2), np.float32)
    out = np.ones((members + 1, size), np.float32)
    weigh = compiled(weigh_slots, lanes, size, members, stored.element_size())
    apart = stored.stride(0) * stored.element_size()
    weigh(stored.data_ptr(), apart, weights.ctypes.data, weights.strides[0], out.ctypes.data)
    expected = 1 + weights[:, :SLOTS].astype(np.float64) @ stored[:, :size].double().numpy()
    assert np.allclose(out[:members], expected, rtol=1e-5, atol=1e-5)
    assert (out[members] == 1).all()


def test_vectors_divide_a_head() -> None:
    for size in (1, 2, 6, 8, 12, 64, 80, 96, 100, 128, 256):
        assert size % lanes_of(size) == 0
    assert lanes_of(64) == (vector_lanes() or 4)
