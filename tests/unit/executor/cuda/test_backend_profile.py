"""Profiling a step of the cuda backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.cuda_host import host_backend, save_small_model

from pagekv.common.errors import OutOfMemory


def test_pools_are_left_alone_by_a_description(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that asks while another's pools are there gets the profile of a step at least as large."""
    backend = host_backend(llama)
    first = backend.describe(16, 20)
    backend.allocate(16, 4, 0)
    pool = backend.cache.device

    def full(*_: object) -> None:
        raise MemoryError("device blocks")

    monkeypatch.setattr("pagekv.executor.cuda.backend.CudaBackend._measure", full)
    assert backend.describe(8, 12).prefill_tokens_per_s == first.prefill_tokens_per_s
    assert backend.cache.device is pool
    with pytest.raises(OutOfMemory, match="token_budget: a step of 40 tokens does not fit"):
        backend.describe(16, 40)


def test_a_step_has_memory_for_partial_results_of_long_contexts(tmp_path: Path) -> None:
    """A profile runs prompts that have nothing before them. Behind long contexts, each of 20 rows and 4 heads may have
    16 partial results of 64 dims, a maximum and a sum, in float32."""
    step_bytes = []
    for length in (8192, 8193):
        directory = tmp_path / str(length)
        save_small_model("llama", directory, max_position_embeddings=length)
        step_bytes.append(2**28 - host_backend(directory, memory_share=1.0).describe(16, 20).device_kv_bytes)
    assert step_bytes[1] - step_bytes[0] == 20 * 4 * 16 * (64 + 2) * 4
