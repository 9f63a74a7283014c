"""Speed of swapping blocks, each way and both ways at once, against one copy of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagekv.kernels.bench.machine import Arena, CudaMachine
from pagekv.kernels.bench.workload import SwapCase
from pagekv.kernels.swap import BlockSwapper


def block_ids(case: SwapCase, seed: int) -> tuple[list[int], list[int]]:
    """Device and host blocks of a case, out of twice as many: scattered blocks never adjoin on both sides."""
    if not case.scattered:
        return list(range(case.num_blocks)), list(range(case.num_blocks))
    rng = np.random.default_rng(seed)
    device, host = (rng.permutation(case.num_blocks) * 2 for _ in range(2))
    return device.tolist(), host.tolist()


def memcpy_gb_per_s(machine: CudaMachine, arena: Arena, host: torch.Tensor) -> tuple[float, float]:
    """(out, in) of one copy of all of `host`, which is pinned."""
    device = arena.view(torch.uint8, len(host))
    out = machine.timed(lambda _: host.copy_(device, non_blocking=True), capture=False).seconds
    into = machine.timed(lambda _: device.copy_(host, non_blocking=True), capture=False).seconds
    return len(host) / out / 1e9, len(host) / into / 1e9


def swap_row(
    machine: CudaMachine, arena: Arena, host: torch.Tensor, case: SwapCase, memcpy: tuple[float, float]
) -> dict[str, Any]:
    """One block size. `host`: pinned memory for four times the case's bytes."""
    slots = 4 * case.num_blocks
    shape = (slots, case.block_bytes)
    device_pool = arena.view(torch.uint8, *shape)
    host_pool = host[: slots * case.block_bytes].view(shape)
    swapper = BlockSwapper(machine.streams(), device_pool, host_pool)
    device, outside = block_ids(case, 0)
    half = 2 * case.num_blocks  # the two directions use different blocks
    device_in, outside_in = ([block + half for block in blocks] for blocks in block_ids(case, 1))

    def out(_: int) -> None:
        swapper.swap_out(device, outside)
        swapper.before_compute()

    def into(_: int) -> None:
        swapper.swap_in(outside_in, device_in)
        swapper.before_compute()

    def both(_: int) -> None:
        swapper.swap_out(device, outside)
        swapper.swap_in(outside_in, device_in)
        swapper.before_compute()

    rates = [case.bytes / machine.timed(run, capture=False).seconds / 1e9 for run in (out, into)]
    return {
        "case": case.name,
        "block_bytes": case.block_bytes,
        "out_gb_per_s": rates[0],
        "in_gb_per_s": rates[1],
        "both_gb_per_s": 2 * case.bytes / machine.timed(both, capture=False).seconds / 1e9,
        "out_against_memcpy": rates[0] / memcpy[0],
        "in_against_memcpy": rates[1] / memcpy[1],
    }
