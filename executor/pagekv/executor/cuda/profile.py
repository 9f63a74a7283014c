"""Measures what a full step takes, in memory and in time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.device import Device
from pagekv.executor.cuda.pools import KvPools
from pagekv.executor.cuda.runner import StepRunner, graph_logits_shape
from pagekv.executor.model.kv_geometry import BlockGeometry
from pagekv.executor.model.loading import LoadedModel

# Sampling that takes all the memory sampling can take.
FULL_SAMPLING = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class CudaStepProfile:
    """What one step of a full token budget takes."""

    # Bytes of device memory at the peak beyond what was held before, and what graphs take besides.
    activation_bytes: int
    # Device memory that can still be had once nothing of the step is left: less than before by what a first step loads.
    available_bytes: int
    prefill_tokens_per_s: int


def profile_step(
    loaded: LoadedModel,
    kv_geometry: BlockGeometry,
    block_size: int,
    token_budget: int,
    max_sequences: int,
    device: Device,
    graphs: bool = True,
) -> CudaStepProfile:
    """Runs steps of `token_budget` tokens over a pool of their own: once prompts as long as the model allows, timed,
    and once as many prompts of one token as there can be, each of which samples in the costliest way.
    `graphs`: count the buffer that runners with graphs have for logits.
    """
    wide = [1] * min(token_budget, max_sequences)
    lengths: list[int] = []
    left = token_budget
    while left > 0 and len(lengths) < max_sequences:
        lengths.append(min(left, loaded.max_model_len))
        left -= lengths[-1]
    num_blocks = max(len(wide), sum(-(-length // block_size) for length in lengths))
    pools = KvPools(kv_geometry, block_size, num_blocks, 0, device)
    runner = StepRunner(loaded, pools, device, max_sequences, graphs=False)
    runner.launch(_prompts([min(lengths[0], 16)], block_size)).collect()  # first calls set things up
    device.reset_peak()
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        runner.launch(_prompts(lengths, block_size)).collect()
        best = min(best, time.perf_counter() - begin)
    runner.launch(_prompts(wide, block_size)).collect()
    activation_bytes = device.peak_bytes()
    if graphs:
        activation_bytes += math.prod(graph_logits_shape(loaded, max_sequences)) * loaded.geometry.dtype.itemsize
    del runner, pools
    return CudaStepProfile(activation_bytes, device.available_bytes(), int(sum(lengths) / best))


def _prompts(lengths: list[int], block_size: int) -> list[Scheduled]:
    scheduled, used = [], 0
    for seq_id, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        table = list(range(used, used + num_blocks))
        used += num_blocks
        state = SequenceState(seq_id, [0] * length, length, table, 0, FULL_SAMPLING)
        scheduled.append(Scheduled(state, 0, length))
    return scheduled
