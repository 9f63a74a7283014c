"""Attention over the paged pool, against plain attention over the same keys in one piece."""

from __future__ import annotations

import math

import pytest
import torch

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.step_attention import PagedStepAttention
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry

LENGTH, CHUNK, BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 23, 9, 4, 4, 2, 8


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
    """`[heads, T, size]` to `[T, heads, size]`, every head over its KV head, position by position."""
    shared = HEADS // KV_HEADS
    weights = torch.einsum("hqd,hkd->hqk", query, key.repeat_interleave(shared, 0)) * scores.scale
    if scores.cap is not None:
        weights = scores.cap * torch.tanh(weights / scores.cap)
    at = torch.arange(LENGTH)
    hidden = at[None] > at[:, None]
    if scores.window is not None:
        hidden |= at[None] <= at[:, None] - scores.window
    weights = weights.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, value.repeat_interleave(shared, 0))


@pytest.mark.parametrize("scores", [Scores(0.4), Scores(0.4, cap=2.0), Scores(0.4, window=6), Scores(0.4, 2.0, 6)])
def test_chunks_and_decodes_read_what_plain_attention_reads(scores: Scores) -> None:
    torch.manual_seed(0)
    query = torch.randn(HEADS, LENGTH, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, KV_HEADS, LENGTH, SIZE, dtype=torch.float64)
    cache = KvCache(BlockGeometry(1, KV_HEADS, SIZE, torch.float64), BLOCK_SIZE, 8)
    cache.device[:-1] = math.nan
    state = SequenceState(1, [1] * LENGTH, LENGTH, [5, 0, 7, 2, 6, 1], 0, Sampling())
    starts = [*range(0, 18, CHUNK), *range(18, LENGTH)]
    outputs = []
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        scheduled = [Scheduled(state, start, end - start)]
        plan = CpuAttentionPlan(scheduled, BLOCK_SIZE, cache.null_block, 1024, torch.float64)
        step = PagedStepAttention(cache, plan)
        outputs.append(step.attend(0, query[:, start:end], key[:, start:end], value[:, start:end], scores))
    assert torch.allclose(torch.cat(outputs), plain(query, key, value, scores))
