"""Attention of one layer over one step, by compiled loops: every row reads its keys and values from the block pool."""

from __future__ import annotations

import torch

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.decode_attention import decode_attention
from pagekv.executor.cpu.native.openmp import empty
from pagekv.executor.cpu.native.prompt_attention import prompt_attention
from pagekv.executor.cpu.native.rows import narrowed
from pagekv.executor.cpu.paged_reads import PagedReads, paged_reads
from pagekv.executor.model.attention_interface import Scores


def step_attention(pools: KvCache, layer: int, query: torch.Tensor, reads: PagedReads, scores: Scores) -> torch.Tensor:
    """Attention of `query` `[T, num_heads, head_size]`, with rows in packed order: `[T, num_heads * head_size]` in the
    query's type. The pools already have this step's keys and values. `reads`: those for the window of `scores`.
    """
    count, num_heads, size = query.shape
    out, lse = empty(count, num_heads, size), empty(count, num_heads)
    if reads.chunks is not None:
        prompt_attention(pools, layer, query, reads.chunks, scores, out, lse, merge=False)
    if reads.decodes is not None:
        decode_attention(pools, layer, query, reads.decodes, scores, out, lse)
    for prefix in reads.prefixes:
        prompt_attention(pools, layer, query, prefix, scores, out, lse, merge=True)
    if scores.sinks is not None:
        # A sink is one more term of the sum of weights, so the output shrinks to the keys' share of that sum. A
        # `Program` cannot record this operator of torch, but no model family with sinks runs on `FusedDecoder`.
        out *= torch.sigmoid(lse - scores.sinks.float())[..., None]
    return narrowed(out.view(count, -1), query.dtype)


class LoopStepAttention:
    """The attention of one step, for transformers' model, by compiled loops. Implements `StepAttention`."""

    def __init__(self, cache: KvCache, plan: CpuAttentionPlan) -> None:
        self._cache, self._plan = cache, plan
        # By window, and by the number of query heads of a KV head.
        self._reads: dict[tuple[int | None, int], PagedReads] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        self._cache.write(layer, self._plan.slots, key.transpose(0, 1), value.transpose(0, 1))
        kv_heads, group = len(key), len(query) // len(key)
        window = self._plan.effective_window(scores.window)
        if (window, group) not in self._reads:
            self._reads[window, group] = paged_reads(
                self._plan.step, self._cache.block_size, window, group, least_runs(kv_heads)
            )
        rows = query.transpose(0, 1)
        return step_attention(self._cache, layer, rows, self._reads[window, group], scores).view(rows.shape)


def least_runs(kv_heads: int) -> int:
    """The fewest runs of rows that keep all threads busy: each thread has two pairs of run and KV head, so that threads
    end at about the same time.
    """
    return -(-2 * torch.get_num_threads() // kv_heads)
