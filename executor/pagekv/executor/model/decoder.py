"""Decoders of the Llama family, as weights and numbers: what a backend needs to compute one with kernels of its own.

transformers' model remains the reference, and serves every family that is not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Types of models, as config.json names them, whose layers are what `DecoderLayer` describes.
FAMILIES = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "seed_oss", "granite"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3"),
    )
)
# Activations by the name that configurations have for them.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Families whose norms multiply by one more than the weight.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`x / sqrt(mean(x * x) + eps) * weight`; `weight` float32 (Zhang and Sennrich, arXiv:1910.07467)."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`; `weight` `[out, in]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: `x += factor * after(f(before(x)))`, for attention and then for the feed-forward part; a norm that is
    None changes nothing.

    `qkv` gives queries, keys and values of all heads, one behind the other. `query_norm` and `key_norm` come before the
    rotation, each over one head or over all, as long as their weights are. `rope` names the rotation: a type of layers, ""
    where the model has one for all, None for no rotation. `gate_up` gives the gate, then what is gated.
    """

    before_attention: RmsNorm | None
    qkv: Linear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    rope: str | None
    out: Linear
    after_attention: RmsNorm | None
    before_feed_forward: RmsNorm | None
    gate_up: Linear
    down: Linear
    after_feed_forward: RmsNorm | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: `cap * tanh(scale * head(norm(layers(embed(ids)))) / cap)`, without a cap the scaled logits."""

    embed: nn.Module
    embed_factor: float
    rotary: nn.Module
    layers: tuple[DecoderLayer, ...]
    activation: str
    residual_factor: float
    norm: RmsNorm
    head: Linear
    logits_scale: float
    logits_cap: float | None

    def rotations(self, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By the layers' names for them: cosines and sines, float32 `[T, rotated elements of a head]`, of positions
        `[1, T]`.
        """
        like = torch.empty(0, dtype=torch.float32)
        found = {}
        for name in {layer.rope for layer in self.layers if layer.rope is not None}:
            cos, sin = self.rotary(like, position_ids, name) if name else self.rotary(like, position_ids)
            found[name] = cos[0].contiguous(), sin[0].contiguous()
        return found


def read_decoder(model: PreTrainedModel) -> Decoder | None:
    """The decoder of a model of transformers, with its weights; None for a family, or a kind within it, that is not
    described here.
    """
    text = model.config.get_text_config()
    activation = ACTIVATIONS.get(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "")
    if text.model_type not in FAMILIES or activation is None:
        return None
    inner: Any = model.model
    more = 1.0 if text.model_type in _ONE_MORE else 0.0
    rotary: Any = inner.rotary_emb
    # One rotation for each type of layers, or one for all.
    types = text.layer_types if hasattr(rotary, "layer_types") else [""] * len(inner.layers)
    return Decoder(
        embed=inner.embed_tokens,
        embed_factor=float(getattr(inner, "embedding_multiplier", 1.0)),
        rotary=rotary,
        layers=tuple(_layer(layer, more, rope) for layer, rope in zip(inner.layers, types, strict=True)),
        activation=activation,
        residual_factor=float(getattr(text, "residual_multiplier", 1.0)),
        norm=_norm(inner.norm, more),
        head=_linear(model.get_output_embeddings()),
        logits_scale=1.0 / float(getattr(text, "logits_scaling", 1.0)),
        logits_cap=getattr(text, "final_logit_softcapping", None),
    )


def _layer(layer: Any, more: float, rope: str) -> DecoderLayer:
    attention, feed_forward = layer.self_attn, layer.mlp

    def norm(of: Any, name: str) -> RmsNorm | None:
        return _norm(getattr(of, name), more) if hasattr(of, name) else None

    # A norm behind the feed-forward part tells that the one called post_attention is behind the attention.
    behind = hasattr(layer, "post_feedforward_layernorm")
    return DecoderLayer(
        before_attention=norm(layer, "input_layernorm"),
        qkv=_joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        rope=rope if getattr(attention, "use_rope", True) else None,
        out=_linear(attention.o_proj),
        after_attention=norm(layer, "post_attention_layernorm") if behind else None,
        before_feed_forward=norm(layer, "pre_feedforward_layernorm" if behind else "post_attention_layernorm"),
        gate_up=_joined(feed_forward, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_linear(feed_forward.down_proj),
        after_feed_forward=norm(layer, "post_feedforward_layernorm"),
    )


def _norm(module: Any, more: float) -> RmsNorm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RmsNorm(module.weight.detach().float() + more, float(eps))


def _linear(module: Any) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _joined(module: Any, whole: str, parts: tuple[str, ...]) -> Linear:
    """The product that a module has as a whole, or of its parts one behind the other."""
    if hasattr(module, whole):
        return _linear(getattr(module, whole))
    found = [_linear(getattr(module, part)) for part in parts]
    weight = torch.cat([part.weight for part in found])
    if all(part.bias is None for part in found):
        return Linear(weight, None)
    return Linear(weight, torch.cat([weight.new_zeros(len(of.weight)) if of.bias is None else of.bias for of in found]))
