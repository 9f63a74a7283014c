"""Rows that are interleaved into pairs, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pagekv.executor.cpu.native.interleave import interleave


@pytest.mark.parametrize(("count", "wide"), [(1, 1), (16, 16), (20, 64), (64, 64)])
@pytest.mark.parametrize("missing", ["", "first", "second", "first second"])
def test_a_pair_has_a_number_of_each_row(count: int, wide: int, missing: str) -> None:
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(1, 2**16, count, np.uint16) for name in ("first", "second")}
    out = np.full(wide + 1, 7, np.uint32)
    addresses = [0 if name in missing.split() else row.ctypes.data for name, row in rows.items()]
    interleave(*addresses, count, wide, out.ctypes.data)
    expected = np.zeros((wide, 2), np.uint16)
    for half, (name, row) in enumerate(rows.items()):
        if name not in missing.split():
            expected[:count, half] = row
    assert np.array_equal(out[:wide].view(np.uint16).reshape(wide, 2), expected)
    assert out[wide] == 7
