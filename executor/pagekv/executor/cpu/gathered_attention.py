"""One step's attention by torch's operators, over blocks that are gathered first. It serves where
`native/step_attention`, which reads the block pool in place, cannot.
"""

from __future__ import annotations

import math

import torch

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.gathered_reads import Context, DecodeGroup, GatheredReads, gathered_reads
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.model.attention_interface import Scores

# Query rows computed at a time where the scores are held in full: this bounds the scores of a head to
# SCORE_ROWS x context.
SCORE_ROWS = 256
# A partial result: output [rows, num_heads, head_size] and log-sum-exp of the scores [rows, num_heads].
Part = tuple[torch.Tensor, torch.Tensor]


class GatheredStepAttention:
    """The attention of one step: writes its keys and values, then reads the keys that each row sees. Implements
    `StepAttention`.
    """

    def __init__(self, cache: KvCache, plan: CpuAttentionPlan) -> None:
        self._cache, self._plan = cache, plan
        # The reads, by window.
        self._reads: dict[int | None, GatheredReads] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        self._cache.write(layer, self._plan.slots, key.transpose(0, 1), value.transpose(0, 1))
        window = self._plan.effective_window(scores.window)
        if window not in self._reads:
            self._reads[window] = gathered_reads(self._plan.step, self._cache, window)
        reads = self._reads[window]
        parts: list[Part] = []
        for part in reads.parts:
            rows = slice(part.first, part.last)
            if isinstance(part, DecodeGroup):
                parts.append(self._decodes(layer, query[:, rows], part, scores))
            elif part.window is None:
                parts.append(_chunk(query[:, rows], key[:, rows], value[:, rows], scores, None))
            else:
                blocks, mask = part.window
                seen = [slots[: mask.shape[-1]].transpose(0, 1) for slots in self._cache.gather(layer, blocks)]
                parts.append(_chunk(query[:, rows], seen[0], seen[1], scores, mask))
        out = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
        if reads.contexts or scores.sinks is not None:
            lse = parts[0][1] if len(parts) == 1 else torch.cat([part[1] for part in parts])
            for context in reads.contexts:
                other = self._context(layer, query[:, context.rows], context, scores)
                out[context.rows], lse[context.rows] = merge(out[context.rows], lse[context.rows], *other)
            if scores.sinks is not None:
                # The sink adds one term to the softmax's denominator: the output keeps the share of the keys' terms.
                out = out * torch.sigmoid(lse - scores.sinks.to(lse.dtype))[..., None].to(out.dtype)
        return out

    def _decodes(self, layer: int, query: torch.Tensor, group: DecodeGroup, scores: Scores) -> Part:
        """`query` `[num_heads, S, head_size]`, one row per sequence."""
        num_heads, count, size = query.shape
        keys, values = self._cache.gather(layer, group.blocks, group.unwritten)
        kv_heads = keys.shape[1]
        # All query heads of one KV head become the rows of one product: [S, kv_heads, heads per KV head, head_size].
        out, lse = attend(
            query.transpose(0, 1).view(count, kv_heads, -1, size),
            keys.view(count, -1, kv_heads, size).transpose(1, 2),
            values.view(count, -1, kv_heads, size).transpose(1, 2),
            scores,
            mask=group.mask,
        )
        return out.reshape(count, num_heads, size), lse.reshape(count, num_heads)

    def _context(self, layer: int, query: torch.Tensor, context: Context, scores: Scores) -> Part:
        """`query` `[num_heads, R, head_size]`; every row sees every key."""
        num_heads, count, size = query.shape
        keys, values = self._cache.gather(layer, context.blocks)
        kv_heads = keys.shape[1]
        # All rows of all query heads of one KV head in one product.
        out, lse = attend(
            query.reshape(1, kv_heads, -1, size),
            keys[None, : context.num_keys].transpose(1, 2),
            values[None, : context.num_keys].transpose(1, 2),
            scores,
        )
        return out.reshape(num_heads, count, size).transpose(0, 1), lse.reshape(num_heads, count).t()


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor | None
) -> Part:
    """`query` `[num_heads, R, size]` over `key`, `value` `[kv_heads, N, size]`; causal, with R == N, if there is no
    mask.
    """
    num_heads, count, size = query.shape
    kv_heads = key.shape[0]
    shared = (-1, num_heads // kv_heads, -1, -1)
    # The batch dimension is the KV head, so that its query heads read the same keys without a copy.
    out, lse = attend(
        query.view(kv_heads, -1, count, size),
        key.unsqueeze(1).expand(shared),
        value.unsqueeze(1).expand(shared),
        scores,
        causal=mask is None,
        mask=mask,
    )
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, size), lse.reshape(num_heads, count).t()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` `[B, H, R, D]` over `key`, `value` `[B, H, N, D]`; ignores the window of `scores`.

    `causal`: row i sees keys 0 to i (R == N). `mask`: `[B or 1, 1, R or 1, N]`, added to the scores. Returns the output
    `[B, H, R, D]` and the log-sum-exp of the scores `[B, H, R]`, which `merge` needs.
    """
    if scores.cap is None:
        # torch's fused CPU kernel of scaled_dot_product_attention, called directly because it also returns the
        # log-sum-exp.
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
    """Attention over the union of two disjoint sets of keys, merged from the attention over each set: outputs
    `[..., D]`, log-sum-exp `[...]`.
    """
    weight = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)
