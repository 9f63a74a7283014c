"""The attention arithmetic of the CPU backend."""

from __future__ import annotations

import math

import torch

from pagekv.executor.model.attention_interface import Scores

# Query rows at a time where scores are held in full: bounds them to this many times the context, per head.
SCORE_ROWS = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` `[B, H, R, D]` over `key`, `value` `[B, H, N, D]`; a window is not looked at.

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
        weights = torch.matmul(rows, key.transpose(-1, -2))
        weights = weights.float() if query.dtype == torch.bfloat16 else weights
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
