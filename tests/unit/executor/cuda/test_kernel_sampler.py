"""The kernel's sampler, in the emulation, chooses what the CPU's does."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.executor.device_sampler import SAMPLERS, DeviceSampler, agree
from support.executor.sampler_vectors import draws

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampling, SequenceState
from pagekv.executor.cpu import sampler as cpu_sampler
from pagekv.executor.cuda import kernel_sampler

VOCAB = 60
KINDS = (
    Sampling(),
    Sampling(temperature=1.0, seed=1, top_p=0.5),
    Sampling(temperature=0.8, seed=2, top_k=5),
    Sampling(temperature=1.0, seed=3, top_k=20, top_p=0.95, min_p=0.01),
    Sampling(temperature=0.9, seed=4, logprobs=20),
    Sampling(logprobs=5, repetition_penalty=1.5),
    Sampling(temperature=100.0, seed=5, top_p=0.999, top_k=VOCAB + 3),
    Sampling(temperature=1.0, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
    Sampling(bias_token_ids=(3, 4), biases=(9.5, 9.0), min_tokens=3, banned_until_min=(3,)),
    Sampling(temperature=1.3, seed=7, repetition_penalty=0.5, bias_token_ids=(1,), biases=(-100.0,), logprobs=0),
)


def device(vocab_size: int = VOCAB) -> DeviceSampler:
    return DeviceSampler(vocab_size, SAMPLERS["kernel"])


@pytest.mark.parametrize("rows_at_once", [1000, 3])
def test_chooses_what_the_cpu_sampler_chooses(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    """Over some steps, of which the host learns the tokens only later; all rows at once, or in parts."""
    monkeypatch.setattr(kernel_sampler, "ADJUSTED_BYTES", 4 * VOCAB * rows_at_once)
    monkeypatch.setattr(kernel_sampler, "LOGPROB_ELEMENTS", 2 * VOCAB)
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in KINDS]
    known, blind = (
        [SequenceState(n, list(prompts[n]), len(prompts[n]), [], 0, kind) for n, kind in enumerate(KINDS)]
        for _ in range(2)
    )
    mine = device()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32):
        logits = (torch.randn(len(KINDS), VOCAB, generator=generator) * 3).to(dtype)
        theirs = cpu_sampler.sample(logits, known)
        agree(mine.sample(logits, blind), theirs)
        for state, other, chosen in zip(known, blind, theirs, strict=True):
            state.token_ids.append(chosen.token_id)
            other.token_ids.append(UNKNOWN_TOKEN)


def test_what_is_no_number_is_marked() -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1, 4] = math.nan
    for kind in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, logprobs=3, frequency_penalty=1.0)):
        states = [SequenceState(n, [1], 1, [], 0, kind) for n in range(3)]
        assert [one.token_id < 0 for one in device().sample(rows, states)] == [False, True, False]


def test_the_tokens_of_the_contract() -> None:
    for logits, states, tokens in draws():
        rows = torch.tensor([logits] * len(states))
        assert [one.token_id for one in device(len(logits)).sample(rows, states)] == tokens
