"""Settings of the engine loop; `pagekv.kvmanager.config` fills them from the flags."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.scheduling.running_queue import SchedulerLimits


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked values; meanings and bounds as in `pagekv-manager --help`."""

    executor: str
    block_size: int
    # 0: as many as the executor's measured memory holds.
    num_device_blocks: int
    # 0: as many as the executor allows.
    num_host_blocks: int
    # 0: the model's own limit.
    max_model_len: int
    # Sequences waiting, preempted ones included, beyond which requests are refused.
    max_queue: int
    # Sequences that have ended and whose readers have not gone, beyond which requests are refused.
    max_unread: int
    # Later arrivals that one level of priority is worth; 0: priority alone decides.
    priority_aging: int
    # Steps in flight, 1 or 2.
    pipeline_depth: int
    # A step without an answer for this long means the executor is lost.
    step_timeout_s: float
    # Epochs that a request's step may fail in, with no token in between, before the request ends.
    step_attempts: int
    # Attach even if another manager's stream lives.
    take_over: bool
    # One of eviction_policy.POLICIES, and the share of the pool, 0 to 1, that `slru` protects at most.
    eviction_policy: str
    protected_share: float
    # Share of the pool, 0 to 1, that pins may hold.
    max_pinned_share: float
    limits: SchedulerLimits
    # Record when each block entered the prefix table.
    block_ages: bool = False
