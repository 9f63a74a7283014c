"""Models with random weights: Llama 3 8B's shape for figures, two small layers for comparing tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


def llama_3_8b(layers: int = 32) -> LlamaConfig:
    """The shape of Llama 3 8B."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )


def write_model(directory: Path, config: LlamaConfig, device: torch.device, spread: float = 0.02) -> None:
    """Configuration and random bf16 weights of standard deviation `spread`, a file a layer, without ever holding the
    model.
    """
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = shape
    where = {}
    for file, tensors in files.items():
        made = {}
        for name, shape in tensors.items():
            tensor = torch.ones(shape, device=device) if len(shape) == 1 else torch.randn(shape, device=device) * spread
            made[name] = tensor.to(torch.bfloat16).cpu()
            where[name] = file
        save_file(made, directory / file, metadata={"format": "pt"})
    total = sum(shape.numel() * 2 for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def two_layers(vocab_size: int = 512) -> LlamaConfig:
    """Small, with heads of a size that kernels serve. To be written with wide weights, so that no logits are near."""
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
