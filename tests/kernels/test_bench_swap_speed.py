"""Swaps of the bench, over host memory."""

from __future__ import annotations

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.swap_speed import block_ids, swap_row
from pagekv.kernels.bench.workload import (
    SwapCase,
)


def test_swapped_blocks_arrive(machine: HostMachine, arena: Arena) -> None:
    case = SwapCase(1, 3, True)
    host = machine.pinned(4 * case.bytes)
    row = swap_row(machine, arena, host, case, (1.0, 2.0))
    device, outside = block_ids(case, 0)
    pools = [memory.view(12, case.block_bytes) for memory in (arena.view(torch.uint8, 4 * case.bytes), host)]
    assert torch.equal(pools[0][device], pools[1][outside])
    assert pools[1].any(1).sum() == 3
    assert row["in_against_memcpy"] == pytest.approx(row["out_against_memcpy"] / 2)
    assert row["both_gb_per_s"] == 2 * row["out_gb_per_s"]
