"""Attention of one layer over one step, by compiled loops: every row reads its keys and values from the block pool."""

from __future__ import annotations

import torch

from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.decode_attention import decode_attention
from pagekv.executor.cpu.native.openmp import empty
from pagekv.executor.cpu.native.prompt_attention import prompt_attention
from pagekv.executor.cpu.native.rows import narrowed
from pagekv.executor.cpu.paged_reads import PagedReads
from pagekv.executor.model.attention_interface import Scores


def step_attention(pools: KvCache, layer: int, query: torch.Tensor, reads: PagedReads, scores: Scores) -> torch.Tensor:
    """`query` `[T, num_heads, head_size]`, rows in packed order, to `[T, num_heads * head_size]` in the type of the
    pools, which have this step's keys and values already. `reads` are those for the window of `scores`.
    """
    count, num_heads, size = query.shape
    out, lse = empty(count, num_heads, size), empty(count, num_heads)
    if reads.chunks is not None:
        prompt_attention(pools, layer, query, reads.chunks, scores, out, lse, merge=False)
    if reads.decodes is not None:
        decode_attention(pools, layer, query, reads.decodes, scores, out, lse)
    for prefix in reads.prefixes:
        prompt_attention(pools, layer, query, prefix, scores, out, lse, merge=True)
    return narrowed(out.view(count, -1), query.dtype)
