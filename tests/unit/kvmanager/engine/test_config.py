"""The engine's configuration and the flags that fill it."""

from __future__ import annotations

from pagekv.common.flags import declarations
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.scheduling.limits import SchedulerLimits


def test_defaults_are_those_of_the_flags_but_for_preemption() -> None:
    config = EngineConfig()
    assert (config.executor, config.block_size, config.max_queue, config.eviction_policy) == (
        "127.0.0.1:50052",
        16,
        1024,
        "slru",
    )
    # A scheduler made without flags has no host pool to swap to.
    assert config.limits == SchedulerLimits()
    assert SchedulerLimits().swap.mode == "recompute"
    assert {each.name: each.default for each in declarations(SchedulerLimits)}["preemption"] == "auto"


def test_decided_values_have_no_flag() -> None:
    names = {each.name.replace("-", "_") for each in declarations(EngineConfig)}
    assert names.isdisjoint({"max_unread", "step_attempts", "protected_share", "preemption_limit", "block_ages"})
