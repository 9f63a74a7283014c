"""Measures what a full step takes, in memory and in time, and how fast blocks are swapped."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.runner import run_step
from pagekv.executor.machine import kib_field
from pagekv.executor.model.kv_geometry import BlockGeometry
from pagekv.executor.model.loading import LoadedModel

# What one round of `profile_swap` copies each way, and how many rounds count.
SWAP_BYTES = 8 * 2**20
SWAP_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class CpuStepProfile:
    """What one step of a full token budget takes."""

    # Bytes of memory at the peak beyond what was held before.
    activation_bytes: int
    prefill_tokens_per_s: int


@dataclass(frozen=True, slots=True)
class SwapProfile:
    """Bytes per second of blocks copied between the pools, as a step copies them."""

    out_bytes_per_s: int
    in_bytes_per_s: int


def profile_swap(geometry: BlockGeometry, block_size: int) -> SwapProfile:
    """Copies scattered blocks out and in again between small pools of its own, which here are in the same memory. The
    first round, which touches the pools' pages, does not count; of the others the fastest does.
    """
    count = max(2, SWAP_BYTES // geometry.bytes_per_block(block_size))
    cache = KvCache(geometry, block_size, count, count)
    there = list(range(0, count, 2)) + list(range(1, count, 2))
    back = there[::-1]
    best = {CopyDirection.SWAP_OUT: float("inf"), CopyDirection.SWAP_IN: float("inf")}
    for counts in (False, *(True for _ in range(SWAP_ROUNDS))):
        for direction in best:
            begin = time.perf_counter()
            cache.copy(BlockCopies(direction, there, back))
            if counts:
                best[direction] = min(best[direction], time.perf_counter() - begin)
    copied = count * geometry.bytes_per_block(block_size)
    return SwapProfile(int(copied / best[CopyDirection.SWAP_OUT]), int(copied / best[CopyDirection.SWAP_IN]))


def profile_step(loaded: LoadedModel, block_size: int, token_budget: int) -> CpuStepProfile:
    """Runs a step of `token_budget` prompt tokens, in sequences as long as the model allows, over a pool of its own."""
    _run_prompts(loaded, block_size, min(token_budget, 16))  # first calls set things up; they are not what is measured
    _reset_peak()
    before = _process_bytes("VmRSS")
    begin = time.perf_counter()
    pool_bytes = _run_prompts(loaded, block_size, token_budget)
    seconds = time.perf_counter() - begin
    growth = max(0, _process_bytes("VmHWM") - before - pool_bytes)
    return CpuStepProfile(growth, int(token_budget / seconds))


def _run_prompts(loaded: LoadedModel, block_size: int, num_tokens: int) -> int:
    """Returns the bytes of the pool it used."""
    lengths = []
    while num_tokens > 0:
        lengths.append(min(num_tokens, loaded.max_model_len))
        num_tokens -= lengths[-1]
    scheduled, used = [], 0
    for seq_id, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        table = list(range(used, used + num_blocks))
        used += num_blocks
        state = SequenceState(seq_id, [0] * length, length, table, 0, Sampling())
        scheduled.append(Scheduled(state, 0, length))
    cache = KvCache(loaded.geometry, block_size, used)
    run_step(loaded.model, cache, scheduled)
    return cache.num_bytes


def _reset_peak() -> None:
    """Makes VmHWM start again from here; where that is refused, the peak of loading counts, which errs on caution."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _process_bytes(name: str) -> int:
    return kib_field(Path("/proc/self/status"), name)
