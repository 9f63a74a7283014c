"""`CudaBackend` outside of its arithmetic: what it says, what it refuses by name, and how steps go through an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cuda_host import HostDevice, host_backend

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import LAYOUT, GraphCounts
from pagekv.executor.cuda.graphs import GraphCache


def test_description(llama: Path) -> None:
    device = HostDevice()
    backend = host_backend(llama, device, max_sequences=7, dtype="bfloat16", kv_dtype="fp8")
    description = backend.describe(16, 20)
    assert (description.num_layers, description.num_kv_heads, description.head_size) == (2, 2, 64)
    assert description.kv_dtype == "float8_e4m3fn"
    assert description.bytes_per_block == 2 * 2 * 16 * 2 * 64
    # Memory of the device, less that of a step and the logits of the largest graph (8 rows), times the share.
    logits = 8 * description.vocab_size * 2
    assert description.device_kv_bytes == int(0.9 * (device.memory - device.peak_bytes() - logits))
    without = host_backend(llama, max_sequences=7, graphs=False).describe(16, 20)
    assert without.device_kv_bytes == int(0.9 * (device.memory - device.peak_bytes()))
    assert description.host_kv_bytes > 0
    assert (description.layout, description.backend, description.max_sequences) == (LAYOUT, "cuda", 7)
    assert (description.device_to_host_bytes_per_s, description.host_to_device_bytes_per_s) == device.bandwidth()
    assert description.prefill_tokens_per_s > 0
    assert description.versions["gpu"] == "emulated"
    # Kernels are compiled before anything is served.
    assert device.prepared is not None
    variant, wgmma_prefill = device.prepared
    assert (variant.dtype, variant.kv_dtype, wgmma_prefill) == ("bfloat16", "float8_e4m3fn", False)


def test_memory_given_is_memory_taken(llama: Path) -> None:
    assert host_backend(llama, kv_memory=10**6).describe(16, 4).device_kv_bytes == 10**6


@pytest.mark.parametrize("available", [4000, 2**50])
def test_the_host_pool_is_a_quarter_of_the_hosts_memory_and_no_larger_than_the_devices(
    llama: Path, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagekv.executor.cuda.backend.available_bytes", lambda: available)
    description = host_backend(llama, kv_memory=10**6).describe(16, 4)
    assert description.host_kv_bytes == (1000 if available == 4000 else 10**6)


def test_memory_for_less_than_a_block_is_refused_before_a_step_is_profiled(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = host_backend(llama, kv_memory=4096)
    monkeypatch.setattr(backend, "_measure", lambda *_: pytest.fail("profiled"))
    with pytest.raises(InvalidRequest, match="more than --kv-memory 4096;"):
        backend.describe(256, 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float64"}, "--dtype float64, .* dtype: must be one of float32, float16, bfloat16, got 'float64'"),
        ({"dtype": "float32", "kv_dtype": "fp8"}, "kv_dtype: must be one of float32 with dtype float32"),
    ],
)
def test_element_types_without_a_kernel_are_refused(llama: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        host_backend(llama, **options)


def test_graphs_that_cannot_be_recorded_are_told(llama: Path) -> None:
    good = host_backend(llama, max_sequences=2).allocate(16, 4, 0)
    assert (good.failed, host_backend(llama, max_sequences=2, graphs=False).allocate(16, 4, 0)) == (0, GraphCounts())
    refusing = host_backend(llama, HostDevice(refuses_capture=True), max_sequences=2)
    assert refusing.allocate(16, 4, 0) == GraphCounts(recorded=0, failed=good.recorded)
    assert good.recorded > 0


def test_graphs_leave_what_the_largest_step_takes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the logits of graphs, which are there by then."""
    left: list[int] = []
    monkeypatch.setattr(GraphCache, "record", lambda self, keys, forward_of, reserve: left.append(reserve))
    device = HostDevice()
    backend = host_backend(llama, device, max_sequences=2, memory_share=1.0)
    for_steps = device.memory - backend.describe(16, 20).device_kv_bytes
    backend.allocate(16, 4, 0)
    assert left == [for_steps - backend.runner.graph_logits.nbytes]
    assert left[0] >= device.peak_bytes()


def test_pools_that_cannot_fit_are_refused(llama: Path) -> None:
    backend = host_backend(llama)
    with pytest.raises(MemoryError, match="are available"):
        backend.allocate(256, 10**6, 0)
    with pytest.raises(MemoryError, match="host blocks"):
        backend.allocate(256, 1, 10**8)
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])


def test_weights_that_do_not_fit_are_refused_before_and_while_they_are_read(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"of the GPU's memory 0\.00 GiB are free .*: use .*a smaller"
    with monkeypatch.context() as patch:
        patch.setattr("pagekv.executor.cuda.backend.load_model", None)
        with pytest.raises(ValueError, match=words):
            host_backend(llama, HostDevice(memory=2**10))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("pagekv.executor.cuda.backend.load_model", full)
    with pytest.raises(ValueError, match=r"loading ran out of GPU memory, of the GPU's .* \(CUDA out of memory"):
        host_backend(llama)


@dataclass
class _MortalDevice(HostDevice):
    dead: bool = False

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: unspecified launch failure")


def test_the_device_is_asked_whether_it_is_lost(llama: Path) -> None:
    device = _MortalDevice()
    backend = host_backend(llama, device)
    errors = (RuntimeError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError("host"))
    assert not any(backend.is_lost(error) for error in errors)
    device.dead = True
    assert all(backend.is_lost(error) for error in errors)
