"""Mistakes that are refused before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagekv.common.models import resolve_model
from pagekv.executor.cpu.backend import DTYPES
from pagekv.executor.model.files import StoredModel, read_model_files
from pagekv.executor.model.start_check import CPU_ELEMENT_BYTES, check_cpu_start, check_kv_memory


def test_element_types_are_those_of_the_cpu_backend() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == CPU_ELEMENT_BYTES


@pytest.mark.parametrize(
    ("dtype", "kv_memory", "words"),
    [
        ("float16", 0, "--dtype float16: must be one of auto, float32, bfloat16, float64 with the cpu backend"),
        ("auto", 1, r"--kv-memory 1: must hold a block of 16 tokens, .* 98304 bytes or more, at 6144 a token"),
        ("auto", 98303, r"--kv-memory 98303: .* 98304 bytes"),
        ("bfloat16", 49151, r"--kv-memory 49151: .* 49152 bytes or more, at 3072 a token"),
    ],
)
def test_flags_that_cannot_serve_the_demo_model(dtype: str, kv_memory: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_cpu_start(resolve_model("demo"), dtype, kv_memory)


def test_only_what_is_certain_is_refused(tmp_path: Path) -> None:
    check_cpu_start(resolve_model("demo"), "auto", 98304)
    check_cpu_start(resolve_model("demo"), "float64", 0)
    stored = read_model_files(resolve_model("demo"))
    assert stored.token_bytes(4) == 6144
    # A shape that config.json does not show.
    unknown = StoredModel("new", None, 4, None, None, None, 2)
    assert unknown.token_bytes(4) is None
    check_kv_memory(tmp_path, unknown, 4, 1)
