"""Options of a replay."""

from __future__ import annotations

import pytest

from pagekv.common.flags import declarations
from pagekv.kvmanager.replay.options import ReplayOptions, StepCost, TimedOptions

OPTIONS = ReplayOptions(block_size=16, tokens_per_id=512, partial_blocks=False)


def test_defaults_are_the_managers() -> None:
    limits = OPTIONS.limits("lru")
    assert (limits.max_batch_tokens, limits.max_running, limits.watermark, limits.prefix_cache) == (
        2048,
        256,
        0.01,
        True,
    )
    assert (OPTIONS.pipeline_depth, OPTIONS.protected_share, OPTIONS.speed) == (2, 0.2, 1.0)


@pytest.mark.parametrize(("policy", "protected"), [("lru", 0), ("slru", 8)])
def test_a_policy_is_an_order_of_eviction(policy: str, protected: int) -> None:
    assert OPTIONS.order(policy, 40).capacity == protected


def test_without_a_cache_nothing_is_looked_up() -> None:
    assert not OPTIONS.limits("none").prefix_cache
    OPTIONS.order("none", 8)


def test_flags_of_timed_mode_come_before_those_of_costs() -> None:
    assert [each.name for each in declarations(TimedOptions)][-4:] == [
        "step-ms",
        "prefill-us",
        "decode-us",
        "kv-read-ns",
    ]


def test_a_step_costs_the_sum_of_its_parts_and_nothing_where_it_computes_nothing() -> None:
    cost = StepCost(step_ms=1.0, prefill_us=10.0, decode_us=100.0, kv_read_ns=1000.0)
    assert cost.seconds(3, 2, 50) == pytest.approx(1e-3 + 30e-6 + 200e-6 + 50e-6)
    assert cost.seconds(0, 0, 50) == 0.0
