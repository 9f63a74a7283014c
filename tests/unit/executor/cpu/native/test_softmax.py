"""The softmax of one panel, alone, against float64, with vectors of several lengths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native.softmax import softmax_rows

TILE_ROWS, KEYS = 5, 64
# Lanes, columns of a panel of scores.
SHAPES = ((4, 8), (8, 16), (2, 32), (4, 4), (16, 64))


def softmax(
    lanes: int,
    wide: int,
    scores: np.ndarray,
    tops: np.ndarray,
    totals: np.ndarray,
    *,
    stored: Any = np.float32,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights, in the type `stored`, and shrinks of `scores` `[rows, KEYS]`; `tops` and `totals` change."""
    width = np.dtype(stored).itemsize

    @njit
    def rows(count: int, scores: int, weights: int, tops: int, totals: int, shrinks: int, scale: float) -> None:
        softmax_rows(lanes, wide, TILE_ROWS, KEYS, width, count, scores, weights, tops, totals, shrinks, scale)

    count = len(scores)
    # Behind the rows there are none.
    panels = np.full((KEYS // wide, TILE_ROWS, wide), np.nan, np.float32)
    panels[:, :count] = scores.reshape(count, KEYS // wide, wide).transpose(1, 0, 2)
    weights, shrinks = np.full((count + 1, KEYS), 7, stored), np.full(count + 1, 7, np.float32)
    addresses = (each.ctypes.data for each in (panels, weights, tops, totals, shrinks))
    rows(count, *addresses, np.float32(scale))
    assert (weights[count] == 7).all()
    assert shrinks[count] == 7
    return weights[:count], shrinks[:count]


@pytest.mark.parametrize(("lanes", "wide"), SHAPES)
def test_panels_one_after_the_other_are_one_softmax(lanes: int, wide: int) -> None:
    rng = np.random.default_rng(0)
    panels = (8 * rng.standard_normal((3, TILE_ROWS - 1, KEYS))).astype(np.float32)
    # Some that are not seen, a whole panel among them.
    panels[:, 0, 3:9] = -np.inf
    panels[0, 1] = panels[2, 2] = -np.inf
    tops, totals = np.full(TILE_ROWS - 1, -np.inf, np.float32), np.zeros(TILE_ROWS - 1, np.float32)
    sums = np.zeros((TILE_ROWS - 1, KEYS))
    for panel in panels:
        weights, shrinks = softmax(lanes, wide, panel, tops, totals)
        assert (weights[np.isneginf(panel)] == 0).all()
        sums = sums * shrinks[:, None] + weights
    whole = panels.astype(np.float64)
    assert np.array_equal(tops, panels.max((0, 2)))
    expected = np.exp(whole - whole.max((0, 2), keepdims=True))
    assert np.allclose(totals, expected.sum((0, 2)), rtol=1e-6)
    assert np.allclose(sums, expected.sum(0), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(("lanes", "wide"), SHAPES)
def test_scores_are_scaled_and_weights_rounded(lanes: int, wide: int) -> None:
    scores = np.random.default_rng(0).standard_normal((TILE_ROWS, KEYS)).astype(np.float32)
    weights, numbers = list[torch.Tensor](), list[np.ndarray]()
    for stored, factor in ((np.float32, 1.0), (np.uint16, 0.5)):
        tops, totals = np.full(TILE_ROWS, -np.inf, np.float32), np.zeros(TILE_ROWS, np.float32)
        found, _ = softmax(lanes, wide, scores * np.float32(1 / factor), tops, totals, stored=stored, scale=factor)
        weights.append(torch.from_numpy(found))
        numbers.append(np.stack([tops, totals]))
    assert torch.equal(weights[1].view(torch.bfloat16), weights[0].bfloat16())
    # The total is of weights that are not rounded.
    assert np.array_equal(numbers[0], numbers[1])


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_what_is_not_seen_weighs_nothing_at_any_scale(scale: float) -> None:
    scores = np.arange(KEYS, dtype=np.float32)[None]
    scores[0, 3:] = -np.inf
    tops, totals = np.full(1, -np.inf, np.float32), np.zeros(1, np.float32)
    weights, _ = softmax(4, 4, scores, tops, totals, scale=scale)
    expected = np.exp(scale * np.arange(3))
    assert tops[0] == 0
    assert np.allclose(weights[0], [*expected, *[0] * (KEYS - 3)])
    assert np.allclose(totals[0], expected.sum())


def test_a_score_that_is_no_number_is_told_and_is_not_the_largest() -> None:
    scores = np.zeros((2, KEYS), np.float32)
    scores[0, 5] = math.nan
    tops, totals = np.full(2, -np.inf, np.float32), np.zeros(2, np.float32)
    softmax(4, 4, scores, tops, totals)
    assert tops.tolist() == [0, 0]
    assert np.isnan(totals).tolist() == [True, False]


def test_what_no_row_has_seen_weighs_nothing() -> None:
    tops, totals = np.full(1, -np.inf, np.float32), np.zeros(1, np.float32)
    weights, shrinks = softmax(4, 4, np.full((1, KEYS), -np.inf, np.float32), tops, totals)
    assert (weights == 0).all()
    assert (tops[0], totals[0], shrinks[0]) == (-np.inf, 0, 0)
