"""Squares that are transposed, alone, with vectors of several lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from pagekv.executor.cpu.native.transpose import transpose


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_columns_are_rows(lanes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stored = torch.randn(lanes, lanes + 3).to(dtype)
    width, out = stored.element_size(), np.full((lanes, lanes + 2), 7, np.float32)

    @njit
    def square(rows: int, row_bytes: int, out: int, out_bytes: int) -> None:
        transpose(lanes, width, rows, row_bytes, out, out_bytes)

    square(stored.data_ptr(), stored.stride(0) * width, out.ctypes.data, out.strides[0])
    assert np.array_equal(out[:, :lanes], stored[:, :lanes].float().numpy().T)
    assert (out[:, lanes:] == 7).all()
