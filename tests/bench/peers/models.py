"""The models that are played, Llamas with random weights, each written once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

MODELS: Mapping[str, Mapping[str, object]] = {
    # 33.6M parameters: what is not products of large matrices shows.
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
    },
    # 494M parameters, with the sizes of Qwen2.5-0.5B: a model that people serve on CPUs, and a vocabulary of today.
    "half-billion": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "initializer_range": 0.03,
    },
}


def write_model(name: str, directory: Path) -> LlamaForCausalLM:
    """The model of this name, which is written there, too."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**MODELS[name], max_position_embeddings=2048, **ends)).eval()
    model.save_pretrained(directory)
    return model


def model_directory(name: str, directory: Path) -> Path:
    """`directory`, with the model of this name in it."""
    if not (directory / "model.safetensors").is_file():
        write_model(name, directory)
    return directory
