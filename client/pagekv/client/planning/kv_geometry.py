"""The shape of a model's keys and values, given in numbers or read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagekv.client.planning.served_context import served_context
from pagekv.common.errors import InvalidRequest

# The content of a config.json; values are checked where they are read.
Config: TypeAlias = Mapping[str, Any]

# Bytes of one stored element.
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
# Used if neither the flags nor the config give a value.
DEFAULT_DTYPE = "float16"
DEFAULT_CONTEXT = 8192

MAX_LAYERS = 10_000
MAX_KV_HEADS = 10_000
MAX_HEAD_SIZE = 65_536
MAX_TOKENS = 2**32

# Names in config.json files: the usual name first, then GPT-2's.
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_HIDDEN = ("hidden_size", "n_embd")
_CONTEXT = ("max_position_embeddings", "n_positions")
# Layers that keep one key and one value vector per KV head and token.
_KV_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The keys and values that a KV cache stores for each token. `context`: most tokens of one sequence."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: str = DEFAULT_DTYPE
    context: int = DEFAULT_CONTEXT


def canonical_dtype(name: str) -> str:
    """The name in DTYPE_BYTES for names such as "fp16" and "torch.bfloat16". Raises InvalidRequest."""
    known = name.removeprefix("torch.").lower()
    known = DTYPE_ALIASES.get(known, known)
    if known not in DTYPE_BYTES:
        raise InvalidRequest("dtype", f"must be one of {', '.join((*DTYPE_BYTES, *DTYPE_ALIASES))}, got {name!r}")
    return known


def geometry_from_config(config: Config, given: Config) -> tuple[KvGeometry, list[str]]:
    """The geometry of a model, and notes on assumptions. `given` has values by the names of a config.json, and
    overrides it.

    `num_key_value_heads` defaults to `num_attention_heads`, `head_dim` to `hidden_size / num_attention_heads`; a
    multimodal model's language model is its `text_config`. Raises InvalidRequest, which names the field of the config,
    for a missing or wrong value, and for caches whose shape a config does not say unless `given` does.
    """
    scopes = (given, *_scopes(config))
    notes: list[str] = []
    _check_layer_kinds(scopes, notes)
    layers = _integer(scopes, _LAYERS, MAX_LAYERS, "--layers")
    kv_heads, head_size, dtype = _kv_heads(scopes), _head_size(scopes), _dtype(scopes, notes)
    values = _find(scopes, ("v_head_dim",))
    if values not in (None, head_size) and _find(scopes[:1], ("head_dim",)) is None:
        raise InvalidRequest(
            "v_head_dim",
            f"must be as wide as keys, {head_size}, because PageKV serves no other model, got {values!r}; --head-size "
            "plans for one width of both",
        )
    if _find(scopes, _CONTEXT) is None:
        notes.append(f"the config names no context: {DEFAULT_CONTEXT} tokens assumed; --context changes it")
        return KvGeometry(layers, kv_heads, head_size, dtype), notes
    context = _integer(scopes, _CONTEXT, MAX_TOKENS, "--context")
    return KvGeometry(layers, kv_heads, head_size, dtype, _served(scopes, context, notes)), notes


def query_heads(config: Config) -> int | None:
    """Query heads of each layer; None if the config does not say."""
    found = _find(_scopes(config), _HEADS)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _scopes(config: Config) -> tuple[Config, ...]:
    """The mappings to look a name up in: the language model's before that of the whole model."""
    nested = config.get("text_config")
    return (nested, config) if isinstance(nested, Mapping) else (config,)


def _served(scopes: tuple[Config, ...], context: int, notes: list[str]) -> int:
    """The context that PageKV serves; if a context was given, that one."""
    served, why = served_context(scopes[1], context)
    if why:
        notes.append(f"PageKV serves {served} tokens of the context of {context}: {why}")
    return context if _find(scopes[:1], _CONTEXT) is not None else served


def _check_layer_kinds(scopes: tuple[Config, ...], notes: list[str]) -> None:
    if _find(scopes, ("kv_lora_rank",)) is not None:
        stored = "of multi-head latent attention PageKV stores the key and value of every attention head"
        # `head_dim` in such a config is the part of a key that is rotated.
        if None in (_find(scopes[:1], ("num_key_value_heads",)), _find(scopes[:1], ("head_dim",))):
            raise InvalidRequest("kv_lora_rank", f"{stored}: give both --kv-heads and --head-size")
        notes.append(f"{stored}, and serves it only where the two are equally wide")
    kinds = _find(scopes, ("layer_types",))
    names = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    other = sorted(names - _KV_LAYER_TYPES)
    if other and _find(scopes[:1], _LAYERS) is None:
        raise InvalidRequest(
            "layer_types",
            f"{', '.join(other)} keeps no keys and values by token: give the number of attention layers with --layers",
        )
    windowed = names & {"sliding_attention", "chunked_attention"}
    if windowed:
        notes.append("layers with a window are counted like the others: the pool keeps every token of a sequence")


def _kv_heads(scopes: tuple[Config, ...]) -> int:
    name = "num_key_value_heads"
    if _find(scopes, (name,)) is not None:
        return _integer(scopes, (name,), MAX_KV_HEADS, "--kv-heads")
    if _find(scopes, ("multi_query", "num_kv_heads", "new_decoder_architecture")):
        # Falcon and GPT-BigCode: the default would be many times the heads that they store.
        raise InvalidRequest(name, "is missing, and the config shares KV heads in its own way: give --kv-heads")
    return _integer(scopes, _HEADS, MAX_KV_HEADS, "--kv-heads")


def _head_size(scopes: tuple[Config, ...]) -> int:
    if _find(scopes, ("head_dim",)) is not None:
        return _integer(scopes, ("head_dim",), MAX_HEAD_SIZE, "--head-size")
    heads = _integer(scopes, _HEADS, MAX_KV_HEADS, "--head-size")
    hidden = _integer(scopes, _HIDDEN, MAX_HEAD_SIZE * MAX_KV_HEADS, "--head-size")
    if hidden % heads:
        raise InvalidRequest("head_dim", f"is missing, and {heads} heads do not divide hidden size {hidden}")
    return hidden // heads


def _dtype(scopes: tuple[Config, ...], notes: list[str]) -> str:
    found = _find(scopes, ("dtype", "torch_dtype"))
    if isinstance(found, str) and found != "auto":
        return canonical_dtype(found)
    notes.append(f"the config names no dtype: {DEFAULT_DTYPE} assumed; --dtype changes it")
    return DEFAULT_DTYPE


def _find(scopes: tuple[Config, ...], names: tuple[str, ...]) -> Any:
    """The first value that exists and is not null; inner scopes come first."""
    for scope in scopes:
        for name in names:
            if scope.get(name) is not None:
                return scope[name]
    return None


def _integer(scopes: tuple[Config, ...], names: tuple[str, ...], high: int, flag: str) -> int:
    value = _find(scopes, names)
    if value is None:
        raise InvalidRequest(names[0], f"is missing in the config: give {flag}")
    # In Python bool is an int, but JSON's true is not a number.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise InvalidRequest(names[0], f"must be a whole number from 1 to {high}, got {value!r}")
    return value
