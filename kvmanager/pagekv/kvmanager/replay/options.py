"""What one replay is asked to do, checked."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, EvictionOrder, make_order
from pagekv.kvmanager.kvcache.eviction_policy import POLICIES as EVICTION_POLICIES
from pagekv.kvmanager.replay.cost_model import StepCost
from pagekv.kvmanager.scheduling.running_queue import SchedulerLimits

# How to treat prefixes: an eviction policy of the pool, or `none`, which switches the prefix cache off.
NO_CACHE = "none"
POLICIES = (*EVICTION_POLICIES, NO_CACHE)
MODES = ("timed", "cache")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The same for every row of a report."""

    block_size: int
    # Prompt tokens behind one hash id of the trace.
    tokens_per_id: int
    # Cache mode: also blocks that a prompt fills only in part count, and are cached, like the trace's last ids.
    partial_blocks: bool
    # Of the pool, at most, under `slru`.
    protected_share: float
    # Timed mode.
    speed: float
    max_batch_tokens: int
    max_running: int
    watermark: float
    pipeline_depth: int
    cost: StepCost

    def limits(self, policy: str) -> SchedulerLimits:
        """The scheduler's bounds under a policy."""
        return SchedulerLimits(self.max_batch_tokens, self.max_running, self.watermark, policy != NO_CACHE)

    def order(self, policy: str, num_blocks: int) -> EvictionOrder:
        """Free blocks of a pool in the order of a policy; without a cache any will do."""
        return make_order(DEFAULT_POLICY if policy == NO_CACHE else policy, num_blocks, self.protected_share)
