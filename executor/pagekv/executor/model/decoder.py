"""Decoders of the Llama family as weights and constants, for backends that compute them with kernels of their own.

transformers' model remains the reference. It also serves every family that is not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

# Model types of config.json whose layers `DecoderLayer` describes.
FAMILIES = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "seed_oss", "granite"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3"),
    )
)
# Families in which some or all layers have a mixture of experts as their feed-forward part.
EXPERT_FAMILIES = frozenset(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"))
# PageKV's names of activations, by transformers' names.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Families whose norms multiply by 1 + weight.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text")
# Types of rotations whose angles depend on the position alone.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
# Model types that cap their logits. Others ignore a cap in their configuration.
_CAPPED = ("gemma2", "gemma3_text")


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
class Embedding:
    """`weight[ids] * factor`, rounded to the weight's type; `weight` `[vocab_size, hidden_size]`."""

    weight: torch.Tensor
    factor: float


@dataclass(frozen=True, slots=True)
class DecoderNorms:
    """The norms of a layer: `x += factor * after(f(before(x)))`, where f is first attention and then the feed-forward
    part. A norm that is None changes nothing. The norms of queries and keys come before the rotation; the length of
    the weight tells whether such a norm is over one head or over all heads.
    """

    before_attention: RmsNorm | None
    query: RmsNorm | None
    key: RmsNorm | None
    after_attention: RmsNorm | None
    before_feed_forward: RmsNorm | None
    after_feed_forward: RmsNorm | None


@dataclass(frozen=True, slots=True)
class GatedProducts:
    """A feed-forward part: `gate_up` is the gate projection followed by the up projection, `down` the down
    projection.
    """

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. `qkv` computes the queries of all heads, then their keys, then their values. `rope` names the
    rotation: a type of layers, "" if the model has one rotation for all layers, None for no rotation. A mixture of
    experts is transformers' own module, `[1, T, hidden_size]` to `[1, T, hidden_size]`.
    """

    norms: DecoderNorms
    rope: str | None
    qkv: Linear
    out: Linear
    feed_forward: GatedProducts | nn.Module

    @property
    def gated(self) -> GatedProducts:
        """The feed-forward part. Raises TypeError for a mixture of experts."""
        if isinstance(self.feed_forward, GatedProducts):
            return self.feed_forward
        raise TypeError("the feed-forward part is a mixture of experts")


class Decoder:
    """A whole model: its logits are `cap * tanh(scale * head(norm(layers(embed_factor * embed(ids)))) / cap)`, or the
    scaled logits without a cap.
    """

    def __init__(self, model: PreTrainedModel, activation: str) -> None:
        """`activation`: a value of ACTIVATIONS."""
        text, inner = model.config.get_text_config(), _inner(model)
        self._model = model
        self._more = 1.0 if text.model_type in _ONE_MORE else 0.0
        self._rotary: Any = inner.rotary_emb
        # One rotation for each type of layers, or one for all.
        by_type = hasattr(self._rotary, "layer_types")
        self._ropes: list[str] = list(text.layer_types) if by_type else [""] * len(inner.layers)
        self._layers = inner.layers
        self.activation = activation
        self._embed: nn.Module = inner.embed_tokens
        self._embed_factor = float(getattr(inner, "embedding_multiplier", 1.0))
        self.residual_factor = float(getattr(text, "residual_multiplier", 1.0))
        self.norm = _norm(inner.norm, self._more)
        self._logits_scale = 1.0 / float(getattr(text, "logits_scaling", 1.0))
        self._logits_cap: float | None = text.final_logit_softcapping if model.config.model_type in _CAPPED else None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The scaled embeddings `[..., hidden_size]` of ids `[...]`: the input of the first layer."""
        stream: torch.Tensor = self._embed(token_ids)
        if self._embed_factor != 1:
            stream *= self._embed_factor
        return stream

    @property
    def embedding(self) -> Embedding:
        """Computes the same as `embed`, unless ranks share the table."""
        module: Any = self._embed
        factor = self._embed_factor
        # Modules with a scale of their own round it to the weight's type.
        if hasattr(module, "embed_scale"):
            factor *= float(module.embed_scale.to(module.weight.dtype))
        return Embedding(module.weight.detach(), factor)

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scales and caps the output of the head, in place."""
        if self._logits_scale != 1:
            logits *= self._logits_scale
        if self._logits_cap is not None:
            logits = logits.div_(self._logits_cap).tanh_().mul_(self._logits_cap)
        return logits

    def take_layer(self, index: int) -> DecoderLayer:
        """A layer with its weights, which leave transformers' model."""
        module: Any = self._layers[index]
        attention, feed_forward = module.self_attn, module.mlp

        def norm(of: Any, name: str) -> RmsNorm | None:
            return _norm(getattr(of, name), self._more) if hasattr(of, name) else None

        # In models with a norm after the feed-forward part, post_attention_layernorm is applied to the attention's
        # output. In others it is the norm before the feed-forward part.
        behind = hasattr(module, "post_feedforward_layernorm")
        layer = DecoderLayer(
            norms=DecoderNorms(
                before_attention=norm(module, "input_layernorm"),
                query=norm(attention, "q_norm"),
                key=norm(attention, "k_norm"),
                after_attention=norm(module, "post_attention_layernorm") if behind else None,
                before_feed_forward=norm(module, "pre_feedforward_layernorm" if behind else "post_attention_layernorm"),
                after_feed_forward=norm(module, "post_feedforward_layernorm"),
            ),
            rope=self._ropes[index] if getattr(attention, "use_rope", True) else None,
            qkv=_joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            out=_linear(attention.o_proj),
            feed_forward=feed_forward if hasattr(feed_forward, "experts") else _gated(feed_forward),
        )
        self._layers[index] = nn.Identity()
        return layer

    def take_head(self) -> Linear:
        """The product that computes the logits; its weights leave transformers' model."""
        head = _linear(self._model.get_output_embeddings())
        self._model.set_output_embeddings(nn.Identity())
        return head

    @property
    def has_fixed_rotations(self) -> bool:
        """Whether rotations depend on the position alone, not for instance on the longest position of the step."""
        kinds = getattr(self._rotary, "rope_type", None)
        return all((kinds.get(name) if isinstance(kinds, dict) else kinds) in _FIXED_ROPES for name in self._ropes)

    def rotations(self, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines, float32 `[T, rotated elements of a head]`, of positions `[1, T]`, on the positions'
        device, by the name of the rotation (`DecoderLayer.rope`).
        """
        # An empty tensor: only its type and device are used.
        like = torch.empty(0, device=position_ids.device)
        found = {}
        for name in {*self._ropes}:
            cos, sin = self._rotary(like, position_ids, name) if name else self._rotary(like, position_ids)
            found[name] = cos[0].contiguous(), sin[0].contiguous()
        return found


def read_decoder(model: PreTrainedModel, *, experts: bool = False) -> Decoder | None:
    """The decoder of a transformers model; None for a family, or a variant of a family, that this module does not
    describe. `experts`: also accepts families with mixtures of experts.
    """
    text = model.config.get_text_config()
    if text.model_type not in (FAMILIES | EXPERT_FAMILIES if experts else FAMILIES):
        return None
    inner = _inner(model)
    # Some OLMoE models clip queries, keys and values.
    if not hasattr(inner, "rotary_emb") or getattr(text, "clip_qkv", None) is not None:
        return None
    # Some configurations name a second activation, which their family does not use.
    feed_forward = next((layer.mlp for layer in inner.layers if not hasattr(layer.mlp, "experts")), None)
    if feed_forward is None:
        # Every layer has experts, which compute their own activation.
        return Decoder(model, ACTIVATIONS["silu"])
    module = feed_forward.act_fn if hasattr(feed_forward, "act_fn") else feed_forward.activation_fn
    activation = next((ours for name, ours in ACTIVATIONS.items() if type(ACT2FN[name]) is type(module)), None)
    return None if activation is None else Decoder(model, activation)


def _inner(model: PreTrainedModel) -> Any:
    """The module with the layers and the embedding; in a model with image input, such as Gemma 3, its text part."""
    return getattr(model.model, "language_model", model.model)


def _norm(module: Any, more: float) -> RmsNorm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RmsNorm(module.weight.detach().float() + more, float(eps))


def _linear(module: Any) -> Linear:
    # In a model split over ranks, this rank's share.
    module = getattr(module, "shard", module)
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _gated(module: Any) -> GatedProducts:
    return GatedProducts(_joined(module, "gate_up_proj", ("gate_proj", "up_proj")), _linear(module.down_proj))


def _joined(module: Any, whole: str, parts: tuple[str, ...]) -> Linear:
    """The fused projection of a module if it has one, else its separate projections joined into one."""
    if hasattr(module, whole):
        return _linear(getattr(module, whole))
    found = [_linear(getattr(module, part)) for part in parts]
    weight = torch.cat([part.weight for part in found])
    if all(part.bias is None for part in found):
        return Linear(weight, None)
    return Linear(weight, torch.cat([weight.new_zeros(len(of.weight)) if of.bias is None else of.bias for of in found]))
