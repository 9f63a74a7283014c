"""Measures the memory and time that a full step takes, and how fast blocks are swapped."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from pagekv.common.freed_memory import give_back_freed_memory
from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling
from pagekv.executor.cpu.forward import StepForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.runner import plan_step, run_step
from pagekv.executor.machine import kib_field
from pagekv.executor.model.description import StepProfile, num_blocks, prompt_lengths, prompt_step
from pagekv.executor.model.loading import BlockGeometry, LoadedModel
from pagekv.executor.model.shards import Shards

# Bytes that one round of `measure_swap_rates` copies in each direction, and the number of rounds that count.
SWAP_BYTES = 8 * 2**20
SWAP_ROUNDS = 4
# Most tokens of a profiled step: enough for matrix products to reach full speed. Scaling the memory up to the budget
# overestimates memory that does not grow with the tokens, and misses some MiB of masks of long windowed prompts (only
# where no compiled loop reads the pool).
PROFILED_TOKENS = 256


def measure_swap_rates(geometry: BlockGeometry, block_size: int) -> tuple[int, int]:
    """Bytes per second of swapping out and of swapping in, measured with scattered blocks between two small temporary
    pools in host memory. The first round touches the pools' pages and does not count; the fastest of the others does.
    """
    count = max(2, SWAP_BYTES // geometry.bytes_per_block(block_size))
    cache = KvCache(geometry, block_size, count, count)
    there = list(range(0, count, 2)) + list(range(1, count, 2))
    back = there[::-1]
    best = {CopyDirection.SWAP_OUT: math.inf, CopyDirection.SWAP_IN: math.inf}
    for counts in (False, *(True for _ in range(SWAP_ROUNDS))):
        for direction in best:
            begin = time.perf_counter()
            cache.copy(BlockCopies(direction, there, back))
            if counts:
                best[direction] = min(best[direction], time.perf_counter() - begin)
    copied = count * geometry.bytes_per_block(block_size)
    return int(copied / best[CopyDirection.SWAP_OUT]), int(copied / best[CopyDirection.SWAP_IN])


def profile_step(
    forward: StepForward,
    loaded: LoadedModel,
    block_size: int,
    token_budget: int,
    max_sequences: int,
    shards: Shards | None = None,
) -> StepProfile:
    """Runs a step of prompts over a temporary pool, with `token_budget` tokens or PROFILED_TOKENS if that is less, in
    prompts as long as the model allows.

    The growth of the process is scaled up to the budget; it includes gaps of the heap and memory of the operators
    themselves. The logits of a step in which the most sequences sample are added without being computed, which would
    take a second and more: with a large vocabulary they are most of such a step's memory.
    """
    # Warm-up: first calls set things up that later calls do not pay for.
    run_prompts(forward, loaded, block_size, min(token_budget, 16), shards)
    tokens = min(token_budget, PROFILED_TOKENS)
    taken, seconds = run_prompts(forward, loaded, block_size, tokens, shards)
    logits = min(token_budget, max_sequences) * loaded.vocab_size * loaded.geometry.dtype.itemsize
    return StepProfile(-(-taken * token_budget // tokens) + logits, int(tokens / seconds))


def run_prompts(
    forward: StepForward, loaded: LoadedModel, block_size: int, num_tokens: int, shards: Shards | None = None
) -> tuple[int, float]:
    """Runs one step. Returns the bytes by which the process grew at the peak, without the pool, and the seconds."""
    lengths = prompt_lengths(num_tokens, loaded.max_model_len, num_tokens)
    cache = KvCache(loaded.geometry, block_size, num_blocks(lengths, block_size))
    # Populates the pool's pages, as they mostly are while serving, so that they do not count.
    cache.device.zero_()
    step = prompt_step(lengths, block_size, Sampling())
    # Otherwise the step would reuse freed memory, and the process would not grow.
    give_back_freed_memory()
    # Resets VmHWM. Where that is refused, the peak of loading counts, which overestimates.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status")
    before = kib_field(status, "VmRSS")
    begin = time.perf_counter()
    run_step(forward, cache, plan_step(cache, step), shards)
    seconds = time.perf_counter() - begin
    return max(0, kib_field(status, "VmHWM") - before), seconds
