"""Speed of swaps against one pinned copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gpu_first.machine import FirstMachine
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.workload import KV_HEADS, MIB, block_bytes
from pagekv.kernels.swap import BlockSwapper

SWAP_BYTES = 512 * MIB
"""Bytes of a swap; device and pinned host memory are four times as much."""


@dataclass(frozen=True)
class SwapCase:
    """Blocks moved between device and host pool."""

    block_size: int
    num_blocks: int
    scattered: bool
    """True: no two blocks adjoin. False: one run, which is a single copy."""

    @property
    def bytes(self) -> int:
        """Bytes moved in one direction."""
        return self.num_blocks * block_bytes(KV_HEADS, self.block_size)

    def __str__(self) -> str:
        return f"block size {self.block_size}, {self.num_blocks} blocks {'scattered' if self.scattered else 'in a run'}"


def swap_cases(total: int = SWAP_BYTES) -> Iterator[SwapCase]:
    """Blocks of each size that make up `total` bytes, at most 2048."""
    for block_size in (1, 16, 64, 256):
        for scattered in (True, False):
            yield SwapCase(block_size, min(2048, total // block_bytes(KV_HEADS, block_size)), scattered)


def pinned_copy(machine: FirstMachine, arena: Arena, size: int) -> tuple[float, float]:
    """GB/s (out, in) of one copy of `size` bytes between the device and pinned memory."""
    device, host = arena.view(torch.uint8, size), machine.pinned(size)
    out = machine.timed(lambda _: host.copy_(device, non_blocking=True), capture=False).seconds
    into = machine.timed(lambda _: device.copy_(host, non_blocking=True), capture=False).seconds
    return size / out / 1e9, size / into / 1e9


def swap_row(machine: FirstMachine, arena: Arena, case: SwapCase, memcpy: tuple[float, float]) -> Row:
    """Swaps each way and both ways at once. `memcpy`: GB/s of a pinned copy out and in."""
    shape = (4 * case.num_blocks, case.bytes // case.num_blocks)
    swapper = BlockSwapper(
        machine.streams(), arena.view(torch.uint8, *shape), machine.pinned(4 * case.bytes).view(shape)
    )
    (device, outside), (device_in, outside_in) = (block_ids(case, seed) for seed in range(2))

    def rate(*, out: bool, into: bool) -> float:
        """GB/s of each direction."""

        def swap(_: int) -> None:
            if out:
                swapper.swap_out(device, outside)
            if into:
                swapper.swap_in(outside_in, device_in)
            swapper.before_compute()

        return case.bytes / machine.timed(swap, capture=False).seconds / 1e9

    out, into = rate(out=True, into=False), rate(out=False, into=True)
    return {
        "case": str(case),
        "out_gb_per_s": out,
        "in_gb_per_s": into,
        "both_gb_per_s": 2 * rate(out=True, into=True),
        "out_against_memcpy": out / memcpy[0],
        "in_against_memcpy": into / memcpy[1],
    }


def block_ids(case: SwapCase, half: int) -> tuple[list[int], list[int]]:
    """Device and host blocks of a case, in one half of pools of four times as many: scattered blocks never adjoin."""
    rng = np.random.default_rng(half)
    step = 2 if case.scattered else 1
    blocks = [rng.permutation(case.num_blocks) if case.scattered else np.arange(case.num_blocks) for _ in range(2)]
    device, host = ((each * step + 2 * half * case.num_blocks).tolist() for each in blocks)
    return device, host
