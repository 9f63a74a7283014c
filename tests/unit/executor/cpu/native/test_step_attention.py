"""Attention of a step with everything in it, against plain attention of each row over its own context."""

from __future__ import annotations

import math

import pytest
import torch

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.gathered_attention import GatheredStepAttention, attend
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.step_attention import LoopStepAttention, step_attention
from pagekv.executor.cpu.paged_reads import paged_reads
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 4, 4, 2, 16


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_of_all_kinds(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    """Chunks and decodes, some behind the same blocks, and one that shares nothing."""
    torch.manual_seed(0)
    common = list(range(100, 110))
    tables = [[*common, 1, 2], [*common, 3, 4], [*common, 5], [6, 7, 8]]
    items = [
        Scheduled(SequenceState(index, [1] * (start + count), 1, table, start, Sampling()), start, count)
        for index, (table, start, count) in enumerate(zip(tables, (40, 43, 41, 0), (7, 1, 1, 11), strict=True))
    ]
    pools = KvCache(BlockGeometry(2, KV_HEADS, SIZE, dtype), BLOCK_SIZE, 120)
    pools.device[:] = math.nan
    keys, values = pools.layer(1)
    for item in items:
        at = torch.arange(item.start + item.count)
        slots = torch.tensor(item.state.block_table)[at // BLOCK_SIZE], at % BLOCK_SIZE
        for part in (keys, values):
            part[slots] = torch.randn(len(at), KV_HEADS, SIZE).to(dtype)
    # Sharing a single block is worth it.
    plan = CpuAttentionPlan(items, BLOCK_SIZE, 2**20)
    reads = paged_reads(plan.step, BLOCK_SIZE, window, 2, 1)
    assert len(reads.prefixes) == (window is None)
    query = torch.randn(plan.input_ids.shape[1], HEADS, SIZE).to(dtype)
    found = step_attention(pools, 1, query, reads, Scores(0.4, window=window))
    assert found.dtype == dtype
    for row in plan.step.rows:
        for place in range(row.item.count):
            end = row.item.start + place + 1
            at = torch.arange(0 if window is None else max(0, end - window), end)
            slots = torch.tensor(row.item.state.block_table)[at // BLOCK_SIZE], at % BLOCK_SIZE
            key, value = (part[slots].double().transpose(0, 1)[None] for part in (keys, values))
            heads = query[row.first + place].double().view(1, KV_HEADS, -1, SIZE)
            expected = attend(heads, key, value, Scores(0.4))[0].flatten()
            assert torch.allclose(found[row.first + place].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_steps_of_transformers_model_are_those_by_its_own_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Layers with a window, with sinks and with neither, and several query heads to a KV head; the step brings keys."""
    torch.manual_seed(0)
    tables = [[*range(8)], [*range(6), 9, 10], [11, 12, 13, 14]]
    found = []
    for kind in (GatheredStepAttention, LoopStepAttention):
        pools = KvCache(BlockGeometry(3, KV_HEADS, SIZE, dtype), BLOCK_SIZE, 16)
        rng = torch.Generator().manual_seed(1)
        outs = []
        for places in (((0, 24), (24, 0), (0, 5)), ((24, 7), (24, 1), (5, 1)), ((31, 1), (25, 1), (6, 6))):
            items = [
                Scheduled(SequenceState(index, [1] * 32, 32, table, start, Sampling()), start, count)
                for index, (table, (start, count)) in enumerate(zip(tables, places, strict=True))
                if count
            ]
            step = kind(pools, CpuAttentionPlan(items, BLOCK_SIZE, 2**20))
            tokens = sum(item.count for item in items)
            sinks = torch.randn(2 * HEADS, generator=rng).to(dtype)
            for layer, (heads, scores) in enumerate(
                ((HEADS, Scores(0.4)), (HEADS, Scores(0.4, 2.0, 6)), (2 * HEADS, Scores(0.3, sinks=sinks)))
            ):
                query, key, value = (
                    torch.randn(count, tokens, SIZE, generator=rng).to(dtype) for count in (heads, KV_HEADS, KV_HEADS)
                )
                out = step.attend(layer, query, key, value, scores)
                assert out.shape == (tokens, heads, SIZE)
                outs.append(out.flatten().float())
        found.append((torch.cat(outs), pools.device))
    (expected, written), (given, also) = found
    assert torch.allclose(given, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(written, also)
