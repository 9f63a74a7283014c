"""Models that would be served wrongly are refused by name, before their weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.cpu_driver import edit_config, save_model
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    LlamaForCausalLM,
    MambaConfig,
    MptConfig,
    ViTConfig,
)

from pagekv.executor.cpu.backend import CpuBackend
from pagekv.executor.model.loading import load_model


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights quantised by 'fp8' are not supported"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"num_kv_shared_layers": 2}, "share keys and values"),
        ({"is_causal": False}, "is_causal false in config.json are not causal"),
    ],
)
def test_configurations_that_would_be_served_wrongly_are_refused(tmp_path: Path, fields: Any, reason: str) -> None:
    save_model("llama", tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=reason):
        CpuBackend(tmp_path, "m", threads=1)


def test_fp8_weights_without_a_word_in_the_configuration_are_refused_by_name(tmp_path: Path) -> None:
    """transformers would read them as numbers, without their scales."""
    save_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is stored as F8_E4M3: fp8 weights are not supported; use the"):
        CpuBackend(tmp_path, "m", threads=1)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


OTHERS: dict[str, Any] = {
    "mamba": MambaConfig(**SMALL),
    "mpt": MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_with_other_attention_are_refused_by_name(tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_config(OTHERS[name])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{type(model).__name__}|{model.config.model_type}"):
        CpuBackend(tmp_path, "m", threads=1)


# transformers' classes choose these models' attention by tables that know no other names than their own.
TABLES: dict[str, Any] = {
    "GPTJForCausalLM": GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8),
    "FalconForCausalLM": FalconConfig(**SMALL, num_attention_heads=2),
    "GPTNeoForCausalLM": GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_models_that_choose_attention_themselves_are_refused_by_name(tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_config(TABLES[name]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf": {name} cannot be served: .* attention interface; use a model that does$"):
        CpuBackend(tmp_path, "m", threads=1)


def test_attention_of_its_own_is_noticed_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the model's class says of itself, in a directory without weights."""
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(LlamaForCausalLM, "_supports_attention_backend", False)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be served"):
        load_model(tmp_path, torch.float32)


def test_models_of_images_are_refused(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="models of type 'vit' are not causal language models"):
        load_model(tmp_path, torch.float32)
