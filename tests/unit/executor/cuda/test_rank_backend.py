"""`CudaBackend` as a rank of a group: what it has, and what it agrees on with the others.

tests/model/test_split_cuda_models.py runs whole models over ranks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.cuda_host import HostDevice, host_backend, save_small_model

from pagekv.executor.cuda.backend import _with_scales
from pagekv.executor.cuda.choose_forward import load_forward
from pagekv.executor.cuda.forward import TransformersForward
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


class Agreeing(Shards):
    """Rank 0 of two that have the whole model each: what is joined is what this one has. `others` is what the other one
    says next, where it does not say the same.
    """

    def __init__(self) -> None:
        super().__init__(World(0, 2, 2), pytest.fail)
        self.others: list[int] = []
        self.said: list[int] = []

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def gather(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        return rows[..., :width]

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def least(self, number: int, *, patient: bool = False, failure: Exception | None = None) -> int:
        self.said.append(number)
        return min(number, self.others.pop(0)) if self.others else number


def save(directory: Path, **fields: Any) -> Path:
    save_small_model("llama", directory, **fields)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(directory: Path, dtype: torch.dtype, device: torch.device, _: Any) -> LoadedModel:
        return load_model(directory, dtype, device)

    monkeypatch.setattr("pagekv.executor.cuda.backend.load_model", load)


def test_host_memory_is_shared_with_the_ranks_of_this_machine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.executor.cuda.backend.available_bytes", lambda: 8 * 2**20)
    alone, rank = host_backend(llama), host_backend(llama, shards=Agreeing())
    assert alone.describe(4, 8).host_kv_bytes == 2 * rank.describe(4, 8).host_kv_bytes == 2 * 2**20


def test_pools_are_on_all_ranks_or_on_none(llama: Path) -> None:
    """Else one would record graphs, whose collectives wait for the one that could not begin."""
    shards, device = Agreeing(), HostDevice()
    backend = host_backend(llama, device, shards=shards, max_sequences=2)
    shards.said.clear()
    shards.others = [0]
    with pytest.raises(MemoryError, match="another rank has too little"):
        backend.allocate(16, 4, 4)
    assert (shards.said, device.pinned_bytes) == ([1], 0)
    with pytest.raises(MemoryError, match="are available"):
        backend.allocate(256, 10**6, 0)
    assert shards.said == [1, 0]
    assert backend.allocate(16, 4, 4).recorded > 0
    assert device.pinned_bytes > 0


def test_one_thread_watches_however_often_a_manager_attaches(llama: Path) -> None:
    shards = Agreeing()
    shards.limit_s = 60.0
    backend = host_backend(llama, shards=shards, max_sequences=2)
    before = sum(thread.name == "marks" for thread in threading.enumerate())
    for tokens in (8, 9):
        backend.describe(4, tokens)
        backend.allocate(16, 4, 0)
    assert sum(thread.name == "marks" for thread in threading.enumerate()) == before + 1


def test_fp8_scales_are_those_of_the_ranks_heads(tmp_path: Path) -> None:
    """Of four KV heads over two ranks the second one has the last two."""
    loaded = replace(load_model(save(tmp_path, num_key_value_heads=4), torch.float32), model_kv_heads=4)
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([1.0, 2.0, 3.0, 4.0])
        for layer in range(2)
        for name in ("k_scale", "v_scale")
    }
    save_file({**load_file(tmp_path / "model.safetensors"), **scales}, tmp_path / "model.safetensors", {"format": "pt"})
    found = [_with_scales(tmp_path, loaded, HostDevice(), Shards(World(rank, 2, 2), pytest.fail)) for rank in (0, 1)]
    for own, wanted in zip(found, ([1.0, 2.0], [3.0, 4.0]), strict=True):
        assert own.kv_scales is not None
        assert own.kv_scales.tolist() == [[wanted] * 2] * 2


def test_no_rank_can_go_on_behind_an_error_in_a_step(llama: Path) -> None:
    assert host_backend(llama, shards=Agreeing()).is_lost(RuntimeError("a step failed"))


@pytest.mark.parametrize("other_can", [True, False])
def test_ranks_compute_all_in_one_way(llama: Path, other_can: bool, caplog: pytest.LogCaptureFixture) -> None:
    shards = Agreeing()
    shards.others = [int(other_can)]
    _, forward = load_forward(lambda: load_model(llama, torch.float32), HostDevice(), fused=True, shards=shards)
    assert isinstance(forward, FusedLayers if other_can else TransformersForward)
    reasons = [getattr(record, "fields", {}).get("reason") for record in caplog.records]
    assert ("another rank cannot" in reasons) is not other_can


def test_the_kernel_samples_on_all_ranks_or_on_none(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers are agreed on, the kernel is not."""
    shards = Agreeing()
    shards.others = [1, 0]
    host_backend(llama, shards=shards)
    assert shards.said == [1, 1]
    assert "tokens are sampled by torch's operators" in caplog.text
