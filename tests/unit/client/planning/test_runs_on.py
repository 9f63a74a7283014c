"""Backends that serve a plan, held against the kernels' variants and the executor's flags."""

from __future__ import annotations

import pytest

from pagekv.client.planning.kv_geometry import DTYPE_BYTES, KvGeometry
from pagekv.client.planning.runs_on import CPU_DTYPES, CUDA_DTYPES, CUDA_HEAD_SIZES, runs_on
from pagekv.executor.config import parse_config
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES


def test_limits_are_those_of_kernels_and_flags() -> None:
    assert CUDA_HEAD_SIZES == HEAD_SIZES
    assert {*CUDA_DTYPES} == {kept for kinds in DTYPE_PAIRS.values() for kept in kinds}
    for dtype in {*CPU_DTYPES, *CUDA_DTYPES} - {"float8_e4m3fn"}:
        assert parse_config(["--dtype", dtype], env={}).dtype == dtype
    assert parse_config(["--kv-dtype", "fp8"], env={}).kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("head_size", "dtype", "cpu", "cuda"),
    [
        (128, "float32", "", ""),
        (128, "bfloat16", "", ""),
        (128, "float16", "float16", ""),
        (128, "float8_e4m3fn", "float8_e4m3fn", ""),
        (128, "float64", "", "float64"),
        (128, "int8", "int8", "int8"),
        (48, "float32", "", "head size of 48"),
    ],
)
def test_a_model_that_a_backend_cannot_serve_has_a_reason(head_size: int, dtype: str, cpu: str, cuda: str) -> None:
    found = runs_on(KvGeometry(2, 2, head_size, dtype))
    for backend, reason in (("cpu", cpu), ("cuda", cuda)):
        assert reason in found[backend]
        assert bool(found[backend]) == bool(reason)


@pytest.mark.parametrize(("heads", "runs"), [(4, False), (6, True), (None, True)])
def test_ranks_have_as_many_query_heads_each(heads: int | None, runs: bool) -> None:
    for reason in runs_on(KvGeometry(2, 2, 64, "float32"), 3, heads).values():
        assert reason == ("" if runs else "3 ranks, which do not divide its 4 query heads")


def test_every_reason_is_told() -> None:
    told = runs_on(KvGeometry(2, 2, 48, "int8"))["cuda"]
    assert all(reason in told for reason in ("int8", "48"))
    assert {*CPU_DTYPES, *CUDA_DTYPES} <= {*DTYPE_BYTES}
