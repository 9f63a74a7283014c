"""The cost of a simulated step."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.replay.cost_model import StepCost


def test_a_step_costs_the_sum_of_its_parts_and_nothing_where_it_computes_nothing() -> None:
    cost = StepCost(step_ms=1.0, prefill_us=10.0, decode_us=100.0, kv_read_ns=1000.0)
    assert cost.seconds(3, 2, 50) == pytest.approx(1e-3 + 30e-6 + 200e-6 + 50e-6)
    assert cost.seconds(0, 0, 50) == 0.0
