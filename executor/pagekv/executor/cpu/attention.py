"""PageKV's attention function in transformers' attention interface, and the attention arithmetic under it.

A transformers model calls `paged_attention` once per layer; which positions see which, and where their keys and values
are, comes with the step (`paged`, a keyword of the model's forward that it hands down untouched). Nothing is global
but the function itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

ATTENTION_NAME = "pagekv"
# Query rows at a time where scores are held in full: bounds them to this many times the context, per head.
SCORE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns query times key into weights: `cap * tanh(scale * qk / cap)`, or `scale * qk` without cap.

    `window`: a position sees itself and the `window - 1` before it; None: all before it.
    """

    scale: float
    cap: float | None = None
    window: int | None = None


class StepAttention(Protocol):
    """One step's attention, for any layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """`query` `[num_heads, T, head_size]`, `key` and `value` `[num_kv_heads, T, head_size]` of the step's packed
        tokens; returns `[T, num_heads, head_size]`.
        """
        ...


class UnsupportedAttention(ValueError):
    """The model asks for attention that PageKV does not compute."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: tensors are `[1, heads, T, head_size]`, the result `[1, T, heads, head_size]`.

    Raises UnsupportedAttention for what would silently change the result if it were ignored.
    """
    if paged is None:
        raise UnsupportedAttention("the model does not hand keyword arguments down to its attention")
    if attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedAttention("the model brings an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("the model's attention is not causal")
    for name in ("position_bias", "s_aux", "block_sequence_ids"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(f"the model's attention uses {name}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("the model's attention layers have no number")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = paged.attend(layer, query[0], key[0], value[0], Scores(scale, softcap, sliding_window))
    return out.unsqueeze(0), None


# No mask function is registered under this name on purpose: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paged_attention)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` `[B, H, R, D]` over `key`, `value` `[B, H, N, D]`; the window is the caller's business.

    `causal`: row i sees keys 0 to i (R == N). `mask`: `[B or 1, 1, R or 1, N]`, added to the scores. Returns the output
    `[B, H, R, D]` and the logarithm of the sum of exponentiated scores `[B, H, R]`, with which parts are merged.
    """
    if scores.cap is None:
        # torch's fused CPU kernel under scaled_dot_product_attention; called by name for its second result.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scores.scale
        )
        return out, lse
    outs, lses = [], []
    for start in range(0, query.shape[2], SCORE_ROWS):
        rows = query[:, :, start : start + SCORE_ROWS]
        weights = (
            torch.matmul(rows, key.transpose(-1, -2)).float()
            if query.dtype == torch.bfloat16
            else torch.matmul(rows, key.transpose(-1, -2))
        )
        weights = weights.mul_(scores.scale / scores.cap).tanh_().mul_(scores.cap)
        if causal:
            future = torch.arange(start, start + rows.shape[2])[:, None] < torch.arange(key.shape[2])
            weights.masked_fill_(future, -math.inf)
        elif mask is not None:
            weights += mask[:, :, start : start + SCORE_ROWS] if mask.shape[2] > 1 else mask
        lse = torch.logsumexp(weights, -1)
        weights = weights.sub_(lse[..., None]).exp_()
        outs.append(torch.matmul(weights.to(value.dtype), value))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from that over each: outputs `[..., D]`, `lse` `[...]`."""
    weight = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)
