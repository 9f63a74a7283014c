"""Sampled rows in chunks, found again on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.executor.device_sampler import DeviceSampler, agree

from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cpu import sampler as cpu_sampler
from pagekv.executor.cuda import torch_sampler

VOCAB = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1000, 20_000])
def test_large_vocabularies_and_coarse_logits(monkeypatch: pytest.MonkeyPatch, dtype: Any, vocab_size: int) -> None:
    """16-bit logits have many ties: which tokens a filter keeps goes by id. Rows come in several chunks."""
    monkeypatch.setattr(torch_sampler, "CHUNK_ELEMENTS", 3 * vocab_size)
    kinds = [
        Sampling(temperature=1.0, seed=1, top_p=0.5),
        Sampling(temperature=0.8, seed=2, top_k=50),
        Sampling(),
        Sampling(temperature=1.0, seed=3, top_k=700, top_p=0.95, min_p=0.001),
        Sampling(temperature=0.9, seed=4, logprobs=20),
        Sampling(logprobs=5, repetition_penalty=1.5),
        Sampling(temperature=1.2, seed=5, top_p=0.999),
        Sampling(temperature=1.0, seed=6, min_p=0.05),
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    states = [SequenceState(n, [1, 2, 3], 2, [], 0, kind) for n, kind in enumerate(kinds)]
    device = DeviceSampler(vocab_size)
    for _ in range(6):
        logits = (torch.randn(len(states), vocab_size, generator=generator) * 3).to(dtype)
        theirs = cpu_sampler.sample(logits, states)
        agree(device.sample(logits, states), theirs)
        for state, chosen in zip(states, theirs, strict=True):
            state.token_ids.append(chosen.token_id)
