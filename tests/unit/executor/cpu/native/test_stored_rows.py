"""Rows of sums as they are stored, with vectors of several lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native import stored_rows
from pagekv.executor.cpu.native.stored_rows import store_rows
from pagekv.executor.cpu.native.vectors import features

ROOM = 7.0


@pytest.fixture(params=["as the processor can", "without its instruction"])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without its instruction":
        monkeypatch.setattr(stored_rows, "features", lambda: features() - {"avx512bf16"})


def stored_by_loops(lanes: int, sums: np.ndarray, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, columns + 3]`, of which `count` columns are stored."""
    out = torch.full((len(sums), sums.shape[1] + 3), ROOM, dtype=dtype)
    width = out.element_size()

    @njit
    def store(rows: int, count: int, sums: int, sums_row: int, out: int, out_row: int) -> None:
        store_rows(lanes, width, rows, count, sums, sums_row, out, out_row)

    store(len(sums), count, sums.ctypes.data, sums.strides[0], out.data_ptr(), out.stride(0) * width)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_rows_are_stored_as_torch_rounds_them(rounding: None, lanes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Aligned as sums of a tile are.
    whole = torch.randn(5, 64)
    whole[:, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.00390625, 1.01171875, 3.4e38])
    sums = whole.numpy()
    found = stored_by_loops(lanes, sums, 48, dtype)
    expected = whole[:, :48].to(dtype)
    assert torch.equal(found[:, :48].isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[:, :48][numbers], expected[numbers])
    assert torch.equal(found[:, :48][numbers].signbit(), expected[numbers].signbit())
    assert (found[:, 48:] == ROOM).all()


def test_no_rows_and_no_columns_store_nothing() -> None:
    sums = torch.ones(3, 64).numpy()
    assert (stored_by_loops(16, sums, 0, torch.bfloat16) == ROOM).all()
    assert stored_by_loops(16, sums[:0], 64, torch.bfloat16).numel() == 0
