"""Small random models of many families: how each differs from the common shape, by transformers' name of its type."""

from __future__ import annotations

from typing import Any

from support.executor.cpu_driver import SMALL, SPREAD, WINDOW
from transformers import CONFIG_MAPPING, PreTrainedConfig

_COMMON: dict[str, Any] = {**SMALL, "num_hidden_layers": 2}
_GATED: dict[str, Any] = {"intermediate_size": 80, "num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_GATED, "head_dim": 16}
_EXPERTS: dict[str, Any] = {**_GATED, "num_experts": 4, "num_experts_per_tok": 2}
# One layer with a window and one without.
_WINDOWS: dict[str, Any] = {
    **_GATED,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Multipliers as in released models: neither 1 nor alike.
_GRANITE: dict[str, Any] = {
    **_GATED,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": _GATED,
    "arcee": _GATED,
    "bitnet": _GATED,
    "cohere": {**_GATED, "logit_scale": 0.5},
    "cohere2": {**_WINDOWS, "logit_scale": 0.5},
    "dots1": {
        **_WINDOWS,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": _HEADS,
    "ernie4_5_moe": {**_GATED, "moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4},
    "exaone4": _WINDOWS,
    "gemma": _HEADS,
    "gemma3_text": {**_WINDOWS, "head_dim": 12, "query_pre_attn_scalar": 7},
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": {
        **_HEADS,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_neox": {"intermediate_size": 80},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "num_local_experts": 4},
    "helium": {**_GATED, "head_dim": 12},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {**_HEADS, "sliding_window": WINDOW},
    "mixtral": {**_GATED, "num_local_experts": 4},
    # Wants numbers for these tokens.
    "modernbert-decoder": {**_WINDOWS, "bos_token_id": 0, "eos_token_id": 0},
    "olmo": {**_GATED, "clip_qkv": 1.0},
    "olmo2": _GATED,
    "olmo3": _WINDOWS,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 32, "init_std": SPREAD},
    "persimmon": {"intermediate_size": 80},
    "phi": _GATED,
    "phi3": {**_GATED, "sliding_window": WINDOW},
    "phimoe": {**_GATED, "num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16},
    "seed_oss": _HEADS,
    # The second layer has no rotary embedding.
    "smollm3": {**_GATED, "no_rope_layers": [1, 0]},
    "starcoder2": {**_GATED, "sliding_window": WINDOW},
}


def family_config(name: str, **own: Any) -> PreTrainedConfig:
    """The configuration of a model with 2 layers and 4 query heads; `own` fields win."""
    fields = {**_COMMON, **FAMILIES.get(name, {}), **own}
    if name == "opt":  # a name of its own for the same
        del fields["initializer_range"]
    return CONFIG_MAPPING[name](**fields)
