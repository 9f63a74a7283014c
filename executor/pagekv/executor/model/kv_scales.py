"""The scales in a checkpoint for keys and values in fp8: one per layer, or one per KV head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pagekv.executor.model.files import tensors

# The names that compressed-tensors and ModelOpt use, and kv_scale of older files for both. vLLM reads the same names.
_NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.(?:attn\.)?(?:[kv]_proj\.)?(k|v|kv)_scale$")


def scales_alone(quantised: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is for keys and values in fp8 only, not for weights."""
    scheme = quantised.get("kv_cache_scheme")
    in_fp8 = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return in_fp8 and not quantised.get("config_groups")


def read_kv_scales(directory: Path, num_layers: int, num_kv_heads: int) -> torch.Tensor | None:
    """float32 `[num_layers, 2, num_kv_heads]`: the factors by which the stored keys, then values, of a head are
    multiplied. None if the checkpoint has no scales.

    Raises ValueError, naming the tensor, if a scale is missing or unusable.
    """
    scales, found = torch.ones(num_layers, 2, num_kv_heads), set()
    for path, name, _ in tensors(directory):
        match = _NAME.search(name)
        # Extra layers after the model's own are for multi-token prediction.
        if match is None or int(match[1]) >= num_layers:
            continue
        with safe_open(path, framework="pt") as file:
            scale = file.get_tensor(name).float().flatten()
        if len(scale) not in (1, num_kv_heads):
            raise ValueError(
                f"{directory}: {name} has {len(scale)} elements; a scale of keys or values has one, or one for each of "
                f"the {num_kv_heads} KV heads"
            )
        if not (scale.isfinite() & (scale > 0)).all():
            raise ValueError(f"{directory}: {name} must be finite and more than 0, got {scale.tolist()}")
        for part in ("k", "v") if match[2] == "kv" else match[2]:
            scales[int(match[1]), "kv".index(part)] = scale
            found.add((int(match[1]), part))
    absent = [(layer, part) for layer in range(num_layers) for part in "kv" if (layer, part) not in found]
    if found and absent:
        layer, part = absent[0]
        raise ValueError(
            f"{directory}: the weights have fp8 scales, but no {part}_scale of layer {layer}; use a complete copy of "
            "the model, or --kv-dtype auto"
        )
    return scales if found else None
