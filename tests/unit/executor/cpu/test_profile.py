"""Measurements of the CPU backend."""

from __future__ import annotations

import torch

from pagekv.executor.cpu.profile import measure_swap_rates
from pagekv.executor.model.loading import BlockGeometry


def test_swapping_is_measured_both_ways() -> None:
    out_rate, in_rate = measure_swap_rates(BlockGeometry(2, 2, 8, torch.float32), 16)
    assert out_rate > 0
    assert in_rate > 0
