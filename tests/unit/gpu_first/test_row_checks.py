"""Checks of row-wise kernels pass on the emulated kernels, and see one that is wrong."""

from __future__ import annotations

import pytest
from gpu_first.row_checks import row_checks
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.rows import RowKernels
from pagekv.kernels.variants import Variant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_kernels_pass(dtype: str) -> None:
    found = list(row_checks(HostMachine(), Variant(dtype, dtype, 64), size=256))
    assert len(found) == 4
    assert all(check.passed for check in found), [str(check) for check in found]


def test_another_activation_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowKernels.gated
    monkeypatch.setattr(RowKernels, "gated", lambda self, gate_up, out, activation: real(self, gate_up, out, "silu"))
    found = list(row_checks(HostMachine(), Variant("float32", "float32", 64), size=256))
    assert [check.passed for check in found] == [True, True, True, False]
