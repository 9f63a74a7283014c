"""What one replay is asked to do, checked."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.replay.cost import StepCost
from pagekv.kvmanager.running import SchedulerLimits

# How to treat prefixes: `lru` is the pool as it is, `none` switches the prefix cache off.
POLICIES = ("lru", "none")
MODES = ("timed", "cache")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The same for every row of a report."""

    block_size: int
    # Prompt tokens behind one hash id of the trace.
    tokens_per_id: int
    # Cache mode: also blocks that a prompt fills only in part count, and are cached, like the trace's last ids.
    partial_blocks: bool
    # Timed mode.
    speed: float
    max_batch_tokens: int
    max_running: int
    watermark: float
    pipeline_depth: int
    cost: StepCost

    def limits(self, policy: str) -> SchedulerLimits:
        """The scheduler's bounds under a policy."""
        return SchedulerLimits(self.max_batch_tokens, self.max_running, self.watermark, policy != "none")
