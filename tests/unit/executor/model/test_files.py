"""A model directory read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from pagekv.executor.cuda.preflight import Gpu, check_model
from pagekv.executor.model.files import HEADS_SHARE_HIDDEN_SIZE, read_model_files

GIB = 2**30


H200 = Gpu("NVIDIA H200", 90, 140 * GIB, (13, 0))


def write(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **config}))
    return directory


@pytest.mark.parametrize("name", sorted(HEADS_SHARE_HIDDEN_SIZE))
def test_types_whose_heads_share_the_hidden_size(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert getattr(config, "head_dim", None) in (None, config.hidden_size // config.num_attention_heads)


def test_weights_that_loading_leaves_out_do_not_count(tmp_path: Path) -> None:
    """Of several files the index names those that are loaded; what is tied, sees or comes after the last layer is
    not."""
    ten = torch.zeros(2, 5)
    one = {"model.language_model.layers.0.w": ten, "model.language_model.layers.1.w": ten.clone()}
    two = {"vision_tower.layers.0.w": ten, "lm_head.weight": ten.clone(), "model.language_model.norm": ten.half()}
    save_file(one, tmp_path / "model-00001-of-00002.safetensors")
    save_file({**two, "model.language_model.ids": ten.long()}, tmp_path / "model-00002-of-00002.safetensors")
    save_file(one, tmp_path / "consolidated.safetensors")
    names = {**dict.fromkeys(one, 1), **dict.fromkeys(two, 2)}
    index = {name: f"model-{number:05}-of-00002.safetensors" for name, number in names.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write(tmp_path, text_config={"num_hidden_layers": 1})
    found = read_model_files(tmp_path)
    assert (found.model_type, found.num_weights) == ("llama", 20)
    write(tmp_path, num_hidden_layers=2, tie_word_embeddings=False)
    assert read_model_files(tmp_path).num_weights == 50
    write(tmp_path, quantization_config={"bits": 4})
    assert read_model_files(tmp_path).num_weights is None


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff\xfe", b'{"text_config": 3, "head_dim": -1, "n_head": true}'])
def test_files_that_cannot_be_read_are_left_to_loading(tmp_path: Path, text: bytes) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(text)
    check_model(tmp_path, "auto", "auto", H200)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + text)
    assert read_model_files(tmp_path).num_weights is None
