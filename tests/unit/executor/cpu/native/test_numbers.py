"""Numbers of compiled loops, against torch's and NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native.numbers import OPTIONS, exp, narrow, widen


@njit(**OPTIONS)
def exps(numbers: Any, out: Any) -> None:
    for at in range(len(numbers)):
        out[at] = exp(numbers[at])


@njit(**OPTIONS)
def stored(numbers: Any, out: Any, back: Any) -> None:
    for at in range(len(numbers)):
        out[at] = narrow(numbers[at], out[at])
        back[at] = widen(out[at])


def test_exp_is_within_two_units_in_the_last_place() -> None:
    numbers = np.linspace(-87, 88, 2_000_001, dtype=np.float32)
    found = np.empty_like(numbers)
    exps(numbers, found)
    exact = np.exp(numbers.astype(np.float64))
    assert np.max(np.abs(found - exact) / np.spacing(exact.astype(np.float32))) < 2


def test_exp_beyond_its_range() -> None:
    numbers = np.array([-np.inf, -1e30, -88, 0, 1e30, np.inf, np.nan], np.float32)
    found = np.empty_like(numbers)
    exps(numbers, found)
    assert (found[:3] < 2e-38).all()
    assert found[3] == 1
    assert np.isposinf(found[4:6]).all()
    assert np.isnan(found[6])


@pytest.mark.parametrize("scale", [1.0, 1e-39, 1e38])
def test_bfloat16_is_rounded_as_torch_rounds_it(scale: float) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):  # some of the large ones become infinite
        numbers = (rng.standard_normal(100_000) * scale).astype(np.float32)
    # Halfway between two: the even one.
    numbers[:2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    numbers[2:5] = np.nan, np.inf, -np.inf
    bits, back = np.empty(len(numbers), np.uint16), np.empty_like(numbers)
    stored(numbers, bits, back)
    theirs = torch.from_numpy(numbers).bfloat16()
    assert np.array_equal(back, theirs.float().numpy(), equal_nan=True)
    assert np.isnan(back[2])


def test_float32_is_stored_as_it_is() -> None:
    numbers = np.array([1.5, np.nan, -np.inf], np.float32)
    out, back = np.empty_like(numbers), np.empty_like(numbers)
    stored(numbers, out, back)
    assert np.array_equal(out, numbers, equal_nan=True)
    assert np.array_equal(back, numbers, equal_nan=True)
