"""The kernels that serve a model, and the rows of padding in a graph."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.cpu_driver import Driver, prompts_of, save_model
from support.executor.cuda_host import HostDevice, host_backend, save_small_model
from support.kernels.host_build import HostLauncher

from pagekv.executor.cuda.kernel_attention import _sinks
from pagekv.executor.model.attention_interface import Scores
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {}, r"LlamaForCausalLM cannot be served by the cuda backend: head_size: .* got 12"),
        ("gpt2", {}, r"GPT2LMHeadModel .* head_size"),
    ],
)
def test_head_sizes_without_a_kernel_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    save_model(name, tmp_path)
    with pytest.raises(ValueError, match=reason):
        host_backend(tmp_path, **options)


def test_a_layer_without_sinks_has_none_beside_one_that_has() -> None:
    """Its softmax is as without: e to the minus infinity is 0, and to the 0 it is 1."""
    given = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    loaded: Any = SimpleNamespace(scores=(Scores(1.0), Scores(1.0, sinks=given)))
    found = _sinks(loaded)
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.float32, [[-math.inf, -math.inf], [1.0, -2.0]])
    assert _sinks(SimpleNamespace(scores=(Scores(1.0),))) is None  # type: ignore[arg-type]  # no more is read


def test_warpgroups_are_refused_where_the_gpu_or_the_model_has_none(llama: Path, tmp_path: Path) -> None:
    needs = "float16 or bfloat16, KV memory of the same type and a head size of 64 or 128"
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "float32 d64"),
        ({"dtype": "float16", "kv_dtype": "fp8"}, "float16/float8_e4m3fn d64"),
    ]
    for options, got in refused:
        with pytest.raises(ValueError, match=f"--wgmma-prefill: .*needs {needs}, got {got}; leave the flag out"):
            host_backend(llama, wgmma_prefill=True, **options)
    device = HostDevice(compute_capability=(8, 0))
    with pytest.raises(ValueError, match=r"--wgmma-prefill: needs .* capability 9\.0, this one has 8\.0 \(emulated\)"):
        host_backend(llama, device, wgmma_prefill=True, dtype="float16")


@pytest.mark.kernels
def test_prompts_by_warpgroups_give_the_same_tokens(llama: Path) -> None:
    """And are computed by that kernel, in chunks of several steps."""
    found, names = [], []
    for wgmma_prefill in (False, True):
        started: set[str] = set()

        class Noted(HostLauncher):
            def launch(self, kernel: str, *args: Any, started: set[str] = started) -> None:
                started.add(kernel)
                super().launch(kernel, *args)

        device = HostDevice(launcher=Noted())
        backend = host_backend(llama, device, dtype="float16", graphs=False, wgmma_prefill=wgmma_prefill)
        driver = Driver(backend, 16, num_blocks=20)
        found.append(driver.generate([driver.sequence(prompts_of([70])[0])], 4))
        names.append(started)
        assert device.prepared is not None
        assert device.prepared[1] is wgmma_prefill
    assert found[0] == found[1]
    assert "pagekv_prefill_wgmma" in names[1] - names[0]


@pytest.mark.kernels
def test_a_checkpoints_fp8_scales_are_those_of_the_pool(tmp_path: Path) -> None:
    """The first layer's keys and values, which come back as they were only with the factors they were stored by."""
    save_small_model("llama", tmp_path, dtype="float16")
    weights = load_file(tmp_path / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
        for layer in range(2)
        for name, scale in (("k_scale", [4.0, 0.25]), ("v_scale", [0.5]))
    }
    save_file({**weights, **scales}, tmp_path / "model.safetensors", {"format": "pt"})
    pools = []
    for directory in (tmp_path, save_without_scales(tmp_path)):
        backend = host_backend(directory, dtype="float16", kv_dtype="fp8", graphs=False)
        driver = Driver(backend, 16, num_blocks=4)
        driver.generate([driver.sequence(prompts_of([20])[0])], 1)
        pools.append(backend.runner.pools.device[:, 0].float())
    scaled, plain = pools
    expected = plain / torch.tensor([[4.0, 0.25], [0.5, 0.5]])[:, None, :, None]
    # Values that are small or large in either are rounded to fewer digits, or cut off.
    exact = (plain.abs() >= 2**-4) & (plain.abs() < 100)
    assert exact.sum() > 1000
    assert torch.equal(scaled[exact], expected[exact])


def save_without_scales(directory: Path) -> Path:
    """A copy of a model without the scales of its checkpoint."""
    copied = directory / "plain"
    shutil.copytree(directory, copied)
    weights = load_file(copied / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "_scale" not in name}
    save_file(kept, copied / "model.safetensors", {"format": "pt"})
    return copied


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_fill_a_graph_up_attend_to_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Three sequences in a graph of four rows, replayed: nothing behind attention reads unwritten memory."""
    backend = host_backend(llama, max_sequences=4, dtype="float32", fused=fused)
    seen, attend = list[torch.Tensor](), PagedAttention.attend

    def watch(self: PagedAttention, layer: int, query: Any, out: Any, plan: AttentionPlan) -> None:
        out.fill_(torch.nan)
        attend(self, layer, query, out, plan)
        if len(query) == 4:
            seen.append(out)

    monkeypatch.setattr(PagedAttention, "attend", watch)
    driver = Driver(backend, 16)
    driver.generate([driver.sequence(prompt) for prompt in prompts_of([3, 4, 250])], 4)
    assert backend.runner.graphs.num_replayed > 0
    assert len(seen) >= 6
    assert all(bool(out[:3].any()) and not out[3].any() for out in seen)
