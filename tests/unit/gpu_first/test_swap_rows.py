"""Rows of swaps over the emulated machine."""

from __future__ import annotations

import pytest
import torch
from gpu_first.swap_rows import SwapCase, block_ids, pinned_copy, swap_cases, swap_row
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.workload import MIB


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return HostMachine()


@pytest.fixture(scope="module")
def arena(machine: HostMachine) -> Arena:
    return Arena(machine, 4 * MIB)


def test_bytes_of_a_swapped_block() -> None:
    assert SwapCase(16, 1, True).bytes == 2 * MIB  # 128 KiB a token, Llama 3 8B
    assert all(0 < case.bytes <= 512 * MIB for case in swap_cases())


def test_swapped_blocks_arrive(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SwapCase(1, 3, True)
    host = torch.zeros(4 * case.bytes, dtype=torch.uint8)
    monkeypatch.setattr(HostMachine, "pinned", lambda self, size: host)
    row = swap_row(machine, arena, case, (1.0, 2.0))
    device, outside = block_ids(case, 0)
    pools = [memory.view(12, case.bytes // 3) for memory in (arena.view(torch.uint8, 4 * case.bytes), host)]
    assert torch.equal(pools[0][device], pools[1][outside])
    assert pools[1].any(1).sum() == 3
    assert row["in_against_memcpy"] == pytest.approx(row["out_against_memcpy"] / 2)
    assert row["both_gb_per_s"] == 2 * row["out_gb_per_s"]
    assert pinned_copy(machine, arena, len(host)) == (len(host) / 1e6, len(host) / 1e6)


def test_scattered_blocks_never_adjoin_and_the_directions_share_none() -> None:
    for scattered in (True, False):
        (device, host), (device_in, host_in) = (block_ids(SwapCase(1, 5, scattered), half) for half in range(2))
        assert not set(device) & set(device_in)
        assert not set(host) & set(host_in)
        gaps = [abs(a - b) for ids in (device, host) for a in ids for b in ids if a != b]
        assert min(gaps) == (2 if scattered else 1)
        assert max(*device_in, *host_in) < 20
