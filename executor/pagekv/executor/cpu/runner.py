"""Runs one step: one packed forward pass over the scheduled sequences, then the sampler."""

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
    forward: StepForward, cache: KvCache, plan: CpuAttentionPlan, shards: Shards | None = None
) -> dict[int, Sampled]:
    """Computes every scheduled position. Returns, by seq_id, the sampled token of every sequence whose last known token
    was computed. `shards`: the ranks of a split model; rank 0 samples and sends the tokens to the others.
    """
    logits = forward.logits(plan, cache)
    cache.reached(plan.highest_block)
    states = [state for _, state in plan.sampling]
    sampled = sample(logits[: len(states)], states) if shards is None or shards.rank == 0 else []
    if shards is not None and states:
        told = shards.tell([each.token_id for each in sampled], len(states))
        sampled = sampled or [Sampled(token_id) for token_id in told]
    return {state.seq_id: token for state, token in zip(states, sampled, strict=True)}


def plan_step(cache: KvCache, scheduled: list[Scheduled], last: CpuAttentionPlan | None = None) -> CpuAttentionPlan:
    """The attention plan of a step; `scheduled` is not empty. `last`: the plan of the step before over this cache, of
    no more use after this call, unless it is returned.
    """
    if last is not None and last.advance(scheduled):
        return last
    return CpuAttentionPlan(scheduled, cache.block_size, cache.layer_block_bytes)
