"""A checkpoint's scales of keys and values in fp8: read by every name that they go by, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.executor.cpu_driver import save_model

from pagekv.executor.model.kv_scales import read_kv_scales, scales_alone
from pagekv.executor.model.loading import load_model

LAYERS, KV_HEADS = 2, 4
OF_LAYER = "model.layers.{}.self_attn"


def checkpoint(directory: Path, **of_layer: Any) -> Path:
    """Weights with these tensors in the attention of each layer; `__` in a name is a dot."""
    found = {
        f"{OF_LAYER.format(layer)}.{name.replace('__', '.')}": torch.as_tensor(value).clone()
        for layer in range(LAYERS)
        for name, value in of_layer.items()
    }
    save_file({**found, "model.embed_tokens.weight": torch.zeros(2, 2)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "names",
    [
        {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor(2.0)},
        {"attn__k_scale": 0.5, "attn__v_scale": 2.0},
        {"k_proj__k_scale": torch.tensor([0.5], dtype=torch.bfloat16), "v_proj__v_scale": 2.0},
    ],
)
def test_one_scale_a_layer_is_that_of_all_heads(tmp_path: Path, names: dict[str, Any]) -> None:
    scales = read_kv_scales(checkpoint(tmp_path, **names), LAYERS, KV_HEADS)
    assert scales is not None
    assert scales.dtype == torch.float32
    assert scales.tolist() == [[[0.5] * KV_HEADS, [2.0] * KV_HEADS]] * LAYERS


def test_a_scale_of_each_head_and_one_for_keys_and_values(tmp_path: Path) -> None:
    of_heads = torch.tensor([[0.5], [1.0], [2.0], [4.0]])
    scales = read_kv_scales(checkpoint(tmp_path, k_scale=of_heads, v_scale=3.0), LAYERS, KV_HEADS)
    assert scales is not None
    assert scales[1].tolist() == [[0.5, 1.0, 2.0, 4.0], [3.0] * KV_HEADS]
    scales = read_kv_scales(checkpoint(tmp_path, kv_scale=0.25), LAYERS, KV_HEADS)
    assert scales is not None
    assert set(scales.flatten().tolist()) == {0.25}


def test_without_scales_there_are_none(tmp_path: Path) -> None:
    assert read_kv_scales(checkpoint(tmp_path, q_scale=0.5), LAYERS, KV_HEADS) is None
    # Layers beyond the model's own predict further tokens.
    assert read_kv_scales(checkpoint(tmp_path, k_scale=0.5, v_scale=0.5), 1, KV_HEADS) is not None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": 0.5}, r"no v_scale of layer 0; use a complete copy"),
        ({"k_scale": [0.5, 0.5], "v_scale": 1.0}, r"layers\.0\.self_attn\.k_scale has 2 elements.* the 4 KV heads"),
        ({"k_scale": 0.0, "v_scale": 1.0}, r"self_attn\.k_scale must be finite and more than 0, got \[0\.0\]"),
        ({"k_scale": 1.0, "v_scale": float("nan")}, r"self_attn\.v_scale must be finite"),
    ],
)
def test_scales_that_cannot_be_used_are_refused_by_name(tmp_path: Path, scales: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_kv_scales(checkpoint(tmp_path, **scales), LAYERS, KV_HEADS)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def test_a_configuration_of_scales_alone() -> None:
    assert scales_alone({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME, "config_groups": {}})
    assert not scales_alone({"kv_cache_scheme": SCHEME, "config_groups": {"group_0": {}}})
    assert not scales_alone({"kv_cache_scheme": {**SCHEME, "type": "int"}})
    assert not scales_alone({"quant_method": "fp8"})


def test_such_a_model_is_loaded(tmp_path: Path) -> None:
    """Its weights are plain; transformers would ask for the package that quantised it."""
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path, torch.float32).kv_scales is None
