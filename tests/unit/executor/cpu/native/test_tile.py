"""One tile of a product, alone; products of all sizes are in test_product."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from pagekv.executor.cpu.native import tile as tile_module
from pagekv.executor.cpu.native import vectors
from pagekv.executor.cpu.native.tile import (
    BFLOAT16_DOT,
    BFLOAT16_MATRIX,
    BFLOAT16_WIDENED,
    FLOAT32,
    bfloat16_sums,
    most_rows,
    panel_vectors,
    tile,
)
from pagekv.executor.cpu.native.vectors import vector_lanes

DEPTH = 5


@njit
def multiply(rows: int, left: int, panel: int, out: int) -> None:
    tile(4, FLOAT32, rows, DEPTH, left, 4 * DEPTH, panel, out, panel, 0)


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
@pytest.mark.parametrize("rows", range(1, most_rows(4, FLOAT32) + 1))
def test_writes_its_rows_and_no_others(rows: int) -> None:
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
    multiply(rows, left.ctypes.data, panel.ctypes.data, out.ctypes.data)
    assert np.allclose(out[:rows], left.astype(np.float64) @ panel, atol=1e-6)
    assert (out[rows:] == 7).all()


@pytest.mark.parametrize(
    ("named", "sums"),
    [
        ("avx512f avx512bf16 amx-bf16 avx2 fma", BFLOAT16_MATRIX),
        ("avx512f avx512bf16 avx2 fma", BFLOAT16_DOT),
        ("avx512f avx2 fma", BFLOAT16_WIDENED),
        ("avx512bf16 avx2 fma", BFLOAT16_WIDENED),
        ("neon", BFLOAT16_WIDENED),
    ],
)
def test_pairs_are_summed_by_one_instruction_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, named: str, sums: int
) -> None:
    for module in (vectors, tile_module):
        monkeypatch.setattr(module, "features", lambda: frozenset(named.split()))
    monkeypatch.setattr(tile_module, "has_matrix_unit", lambda: "amx-bf16" in named)
    assert bfloat16_sums() == sums


@pytest.mark.long
def test_features_are_those_of_the_machine_code() -> None:
    """As with a user who keeps to what all machines have that share the code; LLVM would end the process otherwise."""
    script = "from pagekv.executor.cpu.native.tile import vector_lanes as v, bfloat16_sums as s; print(v(), s())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CPU_NAME": "generic"}
    for features, lanes in (("", 0), ("+avx2,+fma", 8)):
        env["NUMBA_CPU_FEATURES"] = features
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{lanes} {BFLOAT16_WIDENED}\n", done.stderr
