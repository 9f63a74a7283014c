"""Reads the shape of a model and the size of its weights from config.json and the headers of the safetensors files,
without torch, in milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pagekv.common.safetensors_file import MAX_HEADER_BYTES

# Model types whose head size is hidden_size / num_attention_heads if config.json has no head_dim. Other types have
# another default.
HEADS_SHARE_HIDDEN_SIZE = frozenset(
    (
        *("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2"),
        *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "starcoder2"),
    )
)
# Model types in which every layer has weights under its number. In others, layers may have no weights.
NUMBERED_LAYERS = HEADS_SHARE_HIDDEN_SIZE | {"gemma", "gemma2", "gemma3_text", "olmoe", "qwen3", "qwen3_moe"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
# Element types of weights, by their names in safetensors files.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredModel:
    """The language model in a directory; a field is None if the files do not tell it."""

    model_type: str
    dtype: str | None
    """Element type of most of the weights, such as bfloat16; without safetensors files that of config.json."""
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    num_weights: int | None
    """Elements of the weights that are certain to be loaded."""
    num_layers: int | None = None
    hidden_size: int | None = None
    num_linear: int | None = None
    """Elements of the matrices of layers, except experts: nearly all are of linear layers."""

    def token_bytes(self, element_bytes: int) -> int | None:
        """Bytes of one token's keys and values over all layers."""
        heads = self.num_kv_heads or self.num_heads
        if not (self.num_layers and heads and self.head_size):
            return None
        return 2 * self.num_layers * heads * self.head_size * element_bytes


def read_model_files(directory: Path) -> StoredModel:
    """The model as its files describe it. Raises nothing: the code that loads the files reports errors in them."""
    config = _read_object(directory / "config.json")
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    heads = _count(text, "num_attention_heads", "n_head")
    said = text.get("dtype") or text.get("torch_dtype")
    weights = _read_weights(directory, config, text)
    return StoredModel(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        dtype=weights.dtype or (said if isinstance(said, str) else None),
        num_heads=heads,
        num_kv_heads=_count(text, "num_key_value_heads"),
        head_size=_head_size(text, heads),
        num_weights=weights.num_elements,
        num_layers=_count(text, "num_hidden_layers", "n_layer"),
        hidden_size=_count(text, "hidden_size", "n_embd"),
        num_linear=weights.num_linear,
    )


def tensors(directory: Path) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    """Every tensor of the weights: its file, its name, and its header with `dtype` and `shape`."""
    for path in _weight_files(directory):
        for name, header in _read_object(path).items():
            if name != "__metadata__" and isinstance(header, dict):
                yield path, name, header


def absent_layers(directory: Path, stored: StoredModel) -> tuple[int, int | None]:
    """How many layers the files contain no tensor of, and the first of them; 0 and None if that is not certain."""
    if stored.model_type not in NUMBERED_LAYERS or stored.num_layers is None:
        return 0, None
    # Vision or audio towers may have layers with the same numbers. Then fewer layers are reported as absent.
    found = {int(layer[1]) for _, name, _ in tensors(directory) if (layer := _LAYER.search(name))}
    there = {number for number in found if number < stored.num_layers}
    if not found or len(there) == stored.num_layers:
        return 0, None
    return stored.num_layers - len(there), next(number for number in count() if number not in there)


def embedding_size(directory: Path, stored: StoredModel) -> int | None:
    """Elements of a token's embedding in the files; None where the hidden size may differ from it."""
    # OPT's embeddings may have another size, from which they are projected.
    if stored.model_type not in NUMBERED_LAYERS or stored.model_type == "opt":
        return None
    for _, name, tensor in tensors(directory):
        shape = tensor.get("shape")
        if name not in ("embed_tokens.weight", "model.embed_tokens.weight") or tensor.get("dtype") not in FLOATS:
            continue
        if isinstance(shape, list) and len(shape) == 2 and isinstance(shape[1], int):
            return shape[1]
    return None


def _head_size(text: Mapping[str, Any], heads: int | None) -> int | None:
    if "kv_lora_rank" in text or "per_layer_config" in text:
        return None
    size, hidden = _count(text, "head_dim"), _count(text, "hidden_size", "n_embd")
    if size is None and text.get("head_dim") is None and text.get("model_type") in HEADS_SHARE_HIDDEN_SIZE:
        return hidden // heads if hidden and heads else None
    return size


class _Weights(NamedTuple):
    """The weights of the language model, as in `StoredModel`."""

    num_elements: int | None = None
    num_linear: int | None = None
    dtype: str | None = None


def _read_weights(directory: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> _Weights:
    """The weights without tensors that loading may skip. Nothing is told if there are no safetensors files or the
    weights are quantised.
    """
    if config.get("quantization_config") is not None:
        return _Weights()
    layers, linear = _count(text, "num_hidden_layers", "n_layer"), 0
    counts = dict.fromkeys(FLOATS, 0)
    for _, name, tensor in tensors(directory):
        # Vision or audio towers are not loaded with the language model; a tied output head is the embedding again.
        if text is not config and "language_model" not in name:
            continue
        if "lm_head" in name and text.get("tie_word_embeddings", config.get("tie_word_embeddings")) is not False:
            continue
        # Extra layers after the model's own are for multi-token prediction.
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer and layers is not None and int(layer[1]) >= layers:
            continue
        shape, kind = tensor.get("shape"), tensor.get("dtype")
        if kind not in FLOATS:
            continue
        counts[kind] += _size(shape)
        if layer and isinstance(shape, list) and len(shape) == 2 and "expert" not in name:
            linear += _size(shape)
    counted = sum(counts.values())
    if not counted:
        return _Weights()
    return _Weights(counted, linear, FLOATS[max(counts, key=counts.__getitem__)])


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers would load: a directory may hold the same weights twice."""
    if (whole := directory / "model.safetensors").is_file():
        return [whole]
    parts = _read_object(directory / "model.safetensors.index.json").get("weight_map")
    return [directory / name for name in sorted(set(map(str, parts.values())))] if isinstance(parts, dict) else []


def _size(shape: object) -> int:
    return math.prod(shape) if isinstance(shape, list) and all(isinstance(side, int) for side in shape) else 0


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or in the header of a safetensors file; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else -1
            found = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of these fields that is an integer above 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
