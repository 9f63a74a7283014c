"""One tile of a product, alone; products of all sizes are in test_product."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from pagekv.executor.cpu.native.tile import FLOAT32, most_rows, panel_vectors, tile
from pagekv.executor.cpu.native.vectors import vector_lanes

DEPTH = 5


@njit
def multiply(rows: int, left: int, panel: int, out: int, factors: int) -> None:
    tile(4, FLOAT32, rows, DEPTH, left, 4 * DEPTH, panel, out, panel, 0, factors)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rows", range(1, most_rows(4, FLOAT32) + 1))
def test_writes_its_rows_and_no_others(rows: int, adds: bool) -> None:
    wide, most = panel_vectors(4) * 4, most_rows(4, FLOAT32)
    # 64 bytes behind an address that is aligned to them.
    room = np.zeros(16 + DEPTH * wide + (most + 1) * wide, np.float32)
    begin = -room.ctypes.data % 64 // 4
    panel = room[begin:][: DEPTH * wide].reshape(DEPTH, wide)
    out = room[begin + panel.size :][: (most + 1) * wide].reshape(-1, wide)
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, DEPTH), np.float32)
    panel[:] = rng.standard_normal(panel.shape, np.float32)
    out[:] = 7
    factors = rng.standard_normal(rows, np.float32)
    multiply(rows, left.ctypes.data, panel.ctypes.data, out.ctypes.data, factors.ctypes.data if adds else 0)
    kept = 7 * factors[:, None] if adds else 0
    assert np.allclose(out[:rows], left.astype(np.float64) @ panel + kept, atol=1e-5)
    assert (out[rows:] == 7).all()
