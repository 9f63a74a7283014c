"""One tile of a product, alone; products of all sizes are in test_product."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit

from pagekv.executor.cpu.native import tile as tile_module
from pagekv.executor.cpu.native.tile import (
    BFLOAT16_DOT,
    BFLOAT16_WIDENED,
    FLOAT32,
    bfloat16_sums,
    most_rows,
    panel_vectors,
    tile,
    vector_lanes,
)

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
    ("features", "lanes", "sums"),
    [
        ("+avx512f,+avx512bf16,+avx2,+fma", 16, BFLOAT16_DOT),
        ("+avx512f,-avx512bf16,+avx2,+fma", 16, BFLOAT16_WIDENED),
        ("-avx512f,+avx2,+fma", 8, BFLOAT16_WIDENED),
        ("+avx2,-fma", 0, BFLOAT16_WIDENED),
        ("+neon", 4, BFLOAT16_WIDENED),
        ("", 0, BFLOAT16_WIDENED),
    ],
)
def test_vectors_are_those_that_numba_compiles_for(
    monkeypatch: pytest.MonkeyPatch, features: str, lanes: int, sums: int
) -> None:
    generator = SimpleNamespace(magic_tuple=lambda: ("triple", "name", features))
    target = SimpleNamespace(target_context=SimpleNamespace(codegen=lambda: generator))
    monkeypatch.setattr(tile_module, "cpu_target", target)
    monkeypatch.setattr(tile_module, "vector_lanes", vector_lanes.__wrapped__)
    assert vector_lanes.__wrapped__() == lanes
    assert bfloat16_sums.__wrapped__() == sums


@pytest.mark.long
def test_features_are_those_of_the_machine_code() -> None:
    """As with a user who keeps to what all machines have that share the code; LLVM would end the process otherwise."""
    script = "from pagekv.executor.cpu.native.tile import vector_lanes, bfloat16_sums as s; print(vector_lanes(), s())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CPU_NAME": "generic"}
    for features, lanes in (("", 0), ("+avx2,+fma", 8)):
        env["NUMBA_CPU_FEATURES"] = features
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{lanes} {BFLOAT16_WIDENED}\n", done.stderr
