"""Chooses how steps are sampled: by the sampling kernel, if it supports the vocabulary and chooses the same tokens for
a few rows as the sampler in torch's operators; else by the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.kernel_sampler import KernelSampling
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import DeviceSequence
from pagekv.executor.cuda.step_sampling import StepSampling, find_in
from pagekv.executor.cuda.torch_sampler import TorchSampling
from pagekv.kernels.attention_plan import pack
from pagekv.kernels.sampling import MAX_VOCAB_SIZE

log = Log(__name__)

# Makes the sampling of a step from the sequences that sample, the number of columns of the logits, and the counts of
# tokens.
Sampler = Callable[[Sequence[DeviceSequence], int, PenaltyTable], StepSampling]

# Sampling parameters that use every part of the kernel, each with NUM_DRAWS seeds. The filters exclude about half of
# the tokens.
NUM_DRAWS = 8
CHECKED = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=3),
    Sampling(temperature=1.2, top_p=0.5),
    # For most vocabularies, a nucleus of more tokens than the kernel keeps in its list.
    Sampling(temperature=4.0, top_p=0.95),
    Sampling(temperature=1.0, top_k=30, top_p=0.9, min_p=0.3),
    Sampling(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    Sampling(bias_token_ids=(0,), biases=(3.0,)),
)


def choose_sampler(
    num_logits: int, dtype: torch.dtype, device: CudaDevice, agree: Callable[[bool], bool] = bool
) -> Sampler:
    """`num_logits`: columns of the logits, which mostly have the type `dtype`. `agree` turns the result of the check on
    this rank into the result over all ranks.
    """
    if num_logits > MAX_VOCAB_SIZE:
        log.info("tokens are sampled by torch's operators", reason=f"{num_logits} logits, {MAX_VOCAB_SIZE} at most")
        return TorchSampling
    by_kernel = partial(KernelSampling, launcher=device.launcher)
    with phase("checking the sampler"):
        if agree(_tokens(by_kernel, num_logits, dtype, device) == _tokens(TorchSampling, num_logits, dtype, device)):
            return by_kernel
    log.warning("tokens are sampled by torch's operators", reason="the kernel chooses other tokens in a check")
    return TorchSampling


@torch.inference_mode()
def _tokens(sampler: Sampler, num_logits: int, dtype: torch.dtype, device: CudaDevice) -> list[int]:
    """The tokens that a sampler chooses in one step with fixed logits."""
    where = device.torch_device
    generator = torch.Generator().manual_seed(0)
    kinds = [replace(kind, seed=seed) for kind in CHECKED for seed in range(NUM_DRAWS)]
    logits = (torch.randn(len(kinds), num_logits, generator=generator) * 3).to(dtype).to(where)
    states = [SequenceState(index, [0, 1 % num_logits], 1, [], 0, kind) for index, kind in enumerate(kinds)]
    entries = [DeviceSequence(state, state.seq_id) for state in states]
    sampling = sampler(entries, num_logits, PenaltyTable(num_logits, where))
    sections = sampling.sections()
    words, offsets = pack(sections, {name: array.shape for name, array in sections.items()})
    last_tokens = torch.zeros(len(kinds), dtype=torch.int32, device=where)
    sampling.sample(logits, find_in(torch.from_numpy(words).to(where), offsets), last_tokens)
    return last_tokens.tolist()
