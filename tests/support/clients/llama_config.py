"""The config.json of a model of 8 billion parameters, as far as `pagekv plan` reads it."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def without(*names: str, **changes: Any) -> dict[str, Any]:
    """LLAMA without some fields, and with changed ones."""
    return {name: value for name, value in LLAMA.items() if name not in names} | changes
