"""How long vectors are, by what the processor can do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagekv.executor.cpu.native import vectors
from pagekv.executor.cpu.native.vectors import features, vector_lanes


@pytest.mark.parametrize(
    ("named", "lanes"),
    [
        ("+avx512f,+avx2,+fma", 16),
        ("-avx512f,+avx2,+fma", 8),
        ("+avx2,-fma", 0),
        ("+neon", 4),
        ("", 0),
    ],
)
def test_vectors_are_those_that_numba_compiles_for(monkeypatch: pytest.MonkeyPatch, named: str, lanes: int) -> None:
    generator = SimpleNamespace(magic_tuple=lambda: ("triple", "name", named))
    target = SimpleNamespace(target_context=SimpleNamespace(codegen=lambda: generator))
    monkeypatch.setattr(vectors, "cpu_target", target)
    monkeypatch.setattr(vectors, "features", features.__wrapped__)
    assert vector_lanes() == lanes
