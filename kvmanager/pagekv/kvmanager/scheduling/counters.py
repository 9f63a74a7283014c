"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative since the manager started; names as in GetStatsResponse."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    # Preemptions that left blocks in the host pool.
    swap_preemptions: int = 0
    # Blocks copied between the pools.
    swapped_out: int = 0
    swapped_in: int = 0
    written_back: int = 0
