"""Runs one step: scheduled sequences to one packed forward pass to sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from pagekv.executor.backend.interface import Sampled, Scheduled
from pagekv.executor.cpu.attention import PagedStepAttention
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.sampler import sample
from pagekv.executor.model.attention_interface import LAST_ROW, forward

if TYPE_CHECKING:
    from pagekv.executor.cpu.fused_decoder import FusedDecoder


@torch.inference_mode()
def run_step(
    model: PreTrainedModel, cache: KvCache, scheduled: list[Scheduled], fused: FusedDecoder | None = None
) -> dict[int, Sampled]:
    """Computes every scheduled position; the sampled token of every sequence whose last known token was computed."""
    if not scheduled:
        return {}
    block_bytes = cache.geometry.bytes_per_block(cache.block_size) // cache.geometry.num_layers
    plan = CpuAttentionPlan(
        scheduled, cache.block_size, cache.null_block, block_bytes, cache.geometry.dtype, native=fused is not None
    )
    attention = PagedStepAttention(cache, plan)
    if fused is not None:
        indices = torch.tensor([row for row, _ in plan.sampling], dtype=torch.int64)
        logits = fused.logits(plan.input_ids, plan.position_ids, indices, plan.slots, cache, attention)
    else:
        rows = torch.tensor([row for row, _ in plan.sampling]) if plan.sampling else LAST_ROW
        logits = forward(model, plan.input_ids, plan.position_ids, rows, attention)
    states = [state for _, state in plan.sampling]
    sampled = sample(logits[: len(states)], states)
    return {state.seq_id: token for state, token in zip(states, sampled, strict=True)}
