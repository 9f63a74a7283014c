"""Measures what a full step takes, in memory and in time."""

from __future__ import annotations

import math
import time

from pagekv.executor.backend.interface import Sampling
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.pools import KvPools
from pagekv.executor.cuda.runner import StepRunner, graph_logits_shape
from pagekv.executor.model.description import StepProfile, num_blocks, prompt_lengths, prompt_step
from pagekv.executor.model.kv_geometry import BlockGeometry
from pagekv.executor.model.loading import LoadedModel

# Sampling that takes all the memory sampling can take.
FULL_SAMPLING = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)
ROUNDS = 2


def profile_step(
    loaded: LoadedModel,
    kv_geometry: BlockGeometry,
    block_size: int,
    token_budget: int,
    max_sequences: int,
    device: CudaDevice,
    graphs: bool = True,
) -> StepProfile:
    """Runs steps of `token_budget` tokens over a pool made for this: prompts as long as the model allows, timed,
    then as many prompts of one token as there can be, each sampling in the costliest way.
    `graphs`: count the buffer that runners with graphs have for logits.
    """
    lengths = prompt_lengths(token_budget, loaded.max_model_len, max_sequences)
    wide = [1] * min(token_budget, max_sequences)
    most_blocks = max(len(wide), num_blocks(lengths, block_size))
    pools = KvPools(kv_geometry, block_size, most_blocks, device)
    runner = StepRunner(loaded, pools, device, max_sequences, graphs=False)
    runner.launch(prompt_step([min(lengths[0], 16)], block_size, FULL_SAMPLING)).collect()  # first calls set things up
    device.reset_peak()
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        runner.launch(prompt_step(lengths, block_size, FULL_SAMPLING)).collect()
        best = min(best, time.perf_counter() - begin)
    runner.launch(prompt_step(wide, block_size, FULL_SAMPLING)).collect()
    activation_bytes = device.peak_bytes()
    if graphs:
        activation_bytes += math.prod(graph_logits_shape(loaded, max_sequences)) * loaded.geometry.dtype.itemsize
    return StepProfile(activation_bytes, int(sum(lengths) / best))
