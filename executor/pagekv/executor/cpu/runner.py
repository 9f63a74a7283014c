"""Runs one step: scheduled sequences to one packed forward pass to sampled tokens."""

from __future__ import annotations

import torch

from pagekv.executor.backend.interface import Sampled, Scheduled
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.forward import StepForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.sampler import sample
from pagekv.executor.model.shards import Shards


@torch.inference_mode()
def run_step(
    forward: StepForward, cache: KvCache, scheduled: list[Scheduled], shards: Shards | None = None
) -> dict[int, Sampled]:
    """Computes every scheduled position, at least one; the sampled token of every sequence whose last known token was
    computed. `shards`: of a model that is split, rank 0 samples, and tells the others.
    """
    plan = plan_step(cache, scheduled)
    logits = forward.logits(plan, cache)
    cache.reached(int(plan.slots[0].numpy().max()))
    states = [state for _, state in plan.sampling]
    sampled = sample(logits[: len(states)], states) if shards is None or shards.rank == 0 else []
    if shards is not None and states:
        told = shards.tell([each.token_id for each in sampled], len(states))
        sampled = sampled or [Sampled(token_id) for token_id in told]
    return {state.seq_id: token for state, token in zip(states, sampled, strict=True)}


def plan_step(cache: KvCache, scheduled: list[Scheduled]) -> CpuAttentionPlan:
    """The plan of a step that has something scheduled."""
    return CpuAttentionPlan(scheduled, cache.block_size, cache.layer_block_bytes)
