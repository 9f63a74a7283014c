"""The device's sampler chooses what the CPU's does, for many rows at once, with tokens counted on the device."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.device_sampler import DeviceSampler, agree
from support.executor.sampler_vectors import draws
from support.executor.samplings import samplings

from pagekv.executor.backend import row_sampler
from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cpu import sampler as cpu_sampler
from pagekv.executor.cuda.torch_sampler import draw

VOCAB = 40


@given(kinds=st.lists(samplings(VOCAB), min_size=1, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_chooses_what_the_cpu_sampler_chooses(kinds: list[Sampling], seed: int) -> None:
    """Over four steps. Random logits: where a sum meets a bound exactly, the last bit of `exp` would decide."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    states = []
    for seq_id, sampling in enumerate(kinds):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        states.append(SequenceState(seq_id, tokens, rng.randint(1, len(tokens)), [], 0, sampling))
    device = DeviceSampler(VOCAB)
    for _ in range(4):
        logits = torch.randn(len(states), VOCAB, generator=generator) * 4
        theirs = cpu_sampler.sample(logits, states)
        agree(device.sample(logits, states), theirs)
        for state, chosen in zip(states, theirs, strict=True):
            state.token_ids.append(chosen.token_id)


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.full((3, VOCAB), 0.25)
    logits[:, 5] = logits[:, 7] = logits[:, 9] = 1.0
    kinds = [Sampling(), Sampling(logprobs=2), Sampling(temperature=1.0, top_k=1)]
    states = [SequenceState(n, [1], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    chosen = DeviceSampler(VOCAB).sample(logits, states)
    assert [one.token_id for one in chosen] == [5, 5, 5]
    assert [token_id for token_id, _ in chosen[1].top] == [5, 7]


@pytest.mark.parametrize("vocab_size", [1, 256, 257, 5000])
def test_draws_what_the_row_sampler_draws(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    weights = np.exp(2 * rng.standard_normal((200, vocab_size)))
    weights[:, 1:][rng.random((200, vocab_size - 1)) < 0.3] = 0.0
    keys = rng.integers(0, 2**64, 200, np.uint64)
    drawn = draw(torch.from_numpy(weights), torch.from_numpy(keys.view(np.int64)))
    assert drawn.tolist() == [row_sampler.draw(None, *pair) for pair in zip(weights, keys.tolist(), strict=True)]


def test_what_is_no_number_is_marked() -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1, 4] = math.nan
    for kind in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, logprobs=3, frequency_penalty=1.0)):
        states = [SequenceState(n, [1], 1, [], 0, kind) for n in range(3)]
        assert [one.token_id < 0 for one in DeviceSampler(VOCAB).sample(rows, states)] == [False, True, False]


def test_infinite_logits() -> None:
    rows = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    rows[0, 7] = rows[1, 3] = rows[1, 9] = math.inf
    rows[2] = -math.inf
    for kind in (
        Sampling(temperature=1.0, logprobs=3),
        Sampling(temperature=1.0, top_p=0.5, logprobs=3),
        Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.2, logprobs=3),
    ):
        states = [SequenceState(n, [1], 1, [], 0, kind) for n in range(3)]
        found = DeviceSampler(VOCAB).sample(rows, states)
        agree(found, cpu_sampler.sample(rows, states))
        assert found[0].token_id == 7


def test_the_tokens_of_the_contract() -> None:
    vectors = list(draws())
    assert len(vectors) == 12
    for logits, states, tokens in vectors:
        rows = torch.tensor([logits] * len(states))
        assert [one.token_id for one in DeviceSampler(len(logits)).sample(rows, states)] == tokens
