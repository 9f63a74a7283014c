"""The sampler against a slow, straightforward twin, and what makes it a pure function."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.sampler_vectors import draws
from support.executor.samplings import samplings

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampling, SequenceState
from pagekv.executor.backend.sampling import draw_key, exponentials
from pagekv.executor.cpu.sampler import ROWS_AT_ONCE, _sums, sample

VOCAB = 12


def state_of(sampling: Sampling, tokens: list[int], num_prompt: int, seq_id: int = 0) -> SequenceState:
    return SequenceState(seq_id, tokens, num_prompt, [], 0, sampling)


def twin(row: list[float], state: SequenceState) -> int:
    """The token that the sampler should choose, one rule after another in plain Python."""
    sampling, outputs = state.sampling, state.token_ids[state.num_prompt_tokens :]
    logits = list(row)
    for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
        logits[token_id] += bias
    if len(outputs) < sampling.min_tokens and len(set(sampling.banned_until_min)) < len(logits):
        for token_id in sampling.banned_until_min:
            logits[token_id] = -math.inf
    for token_id in set(state.token_ids):
        factor = sampling.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id in set(outputs):
        logits[token_id] -= sampling.presence_penalty + outputs.count(token_id) * sampling.frequency_penalty
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if sampling.temperature == 0:
        return ranked[0]
    best = logits[ranked[0]]
    # numpy's exp over the same numbers: the last bit of another exp would decide at the very bounds of a filter.
    weights: list[float] = np.exp((np.array(logits) - best) / sampling.temperature).tolist()
    kept = set(ranked[: sampling.top_k or len(ranked)])
    if sampling.top_p < 1:
        total = sum(weights[token_id] for token_id in range(len(weights)) if token_id in kept)
        nucleus, held = set(), 0.0
        for token_id in sorted(kept, key=lambda token_id: (-weights[token_id], token_id)):
            nucleus.add(token_id)
            held += weights[token_id]
            if held >= sampling.top_p * total:
                break
        kept = nucleus
    kept = {token_id for token_id in kept if weights[token_id] >= sampling.min_p}
    # All tokens are of one group, which wins alone.
    key = draw_key(sampling.seed, sampling.sequence_index, len(state.token_ids))
    return max(sorted(kept), key=lambda token_id: weights[token_id] / exponentials(key, np.array([token_id]))[0])


# Few distinct values, so that ties and exact bounds are common.
logit = st.one_of(st.sampled_from([-2.0, 0.0, 0.5, 0.5, 3.0]), st.floats(-20, 20, width=32))
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)
token = st.integers(0, VOCAB - 1)
anything = samplings(VOCAB, temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 100.0]))


@given(row=rows, sampling=anything, tokens=st.lists(token, min_size=1, max_size=9), data=st.data())
@settings(max_examples=400, deadline=None)
def test_chooses_what_the_twin_chooses(
    row: list[float], sampling: Sampling, tokens: list[int], data: st.DataObject
) -> None:
    state = state_of(sampling, tokens, data.draw(st.integers(1, len(tokens))))
    (sampled,) = sample(torch.tensor([row], dtype=torch.float64), [state])
    assert sampled.token_id == twin(row, state)
    assert (sampled.logprob is None) == (sampling.logprobs is None)


@given(row=rows, sampling=anything)
@settings(max_examples=100, deadline=None)
def test_log_probabilities_are_of_the_raw_logits(row: list[float], sampling: Sampling) -> None:
    state = state_of(sampling, [1, 2, 3], 2)
    (sampled,) = sample(torch.tensor([row], dtype=torch.float64), [state])
    if sampling.logprobs is None:
        assert sampled.top == ()
        return
    expected = torch.log_softmax(torch.tensor(row, dtype=torch.float64), -1).tolist()
    assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=1e-9)
    ranked = sorted(range(VOCAB), key=lambda token_id: (-row[token_id], token_id))[: sampling.logprobs]
    assert [token_id for token_id, _ in sampled.top] == ranked
    assert [logprob for _, logprob in sampled.top] == pytest.approx([expected[i] for i in ranked], abs=1e-9)


@given(row=rows, others=st.lists(rows, max_size=3), sampling=anything, at=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_neighbours_change_nothing(row: list[float], others: list[list[float]], sampling: Sampling, at: int) -> None:
    state = state_of(sampling, [4, 4, 5], 1)
    (alone,) = sample(torch.tensor([row]), [state])
    place = min(at, len(others))
    batch = [*others[:place], row, *others[place:]]
    states = [state_of(Sampling(temperature=1.0, seed=9), [1], 1, seq_id=index) for index in range(len(batch))]
    states[place] = state
    assert sample(torch.tensor(batch), states)[place] == alone


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.full((2, VOCAB), 0.25)
    row[:, 5] = row[:, 7] = 1.0
    states = [state_of(Sampling(), [1], 1), state_of(Sampling(logprobs=2), [1], 1, seq_id=1)]
    plain, with_logprobs = sample(row, states)
    assert plain.token_id == with_logprobs.token_id == 5
    assert [token_id for token_id, _ in with_logprobs.top] == [5, 7]


def test_bans_end_with_min_tokens() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 3] = 9.0
    sampling = Sampling(min_tokens=2, banned_until_min=(3,))
    assert [sample(row, [state_of(sampling, [1] * (1 + n), 1)])[0].token_id for n in range(3)] == [0, 0, 3]


def test_a_ban_of_everything_is_none() -> None:
    sampling = Sampling(min_tokens=2, banned_until_min=tuple(range(VOCAB)), temperature=1.0)
    assert 0 <= sample(torch.zeros(1, VOCAB), [state_of(sampling, [1], 1)])[0].token_id < VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_many_rows_each_is_its_own(dtype: torch.dtype) -> None:
    count = 2 * ROWS_AT_ONCE + 3
    rows = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[ROWS_AT_ONCE + 1, 4] = math.nan
    kinds = (Sampling(), Sampling(temperature=1.0, top_k=5), Sampling(logprobs=2, presence_penalty=1.0))
    states = [state_of(kinds[index % 3], [index % VOCAB, 3], 1, seq_id=index) for index in range(count)]
    sampled = sample(rows, states)
    assert sampled == [sample(row[None], [state])[0] for row, state in zip(rows, states, strict=True)]
    assert [index for index, one in enumerate(sampled) if one == NOT_A_NUMBER] == [ROWS_AT_ONCE + 1]


@pytest.mark.parametrize("size", [1, 2, 17, 4099, 152_000])
def test_sums_are_numpys_to_the_last_bit(size: int) -> None:
    """Otherwise other backends that sample by rows would not draw the same tokens."""
    rng = np.random.default_rng(size)
    for spread in (0.1, 1.0, 8.0):
        weights = np.exp(spread * rng.standard_normal(size))
        assert _sums(weights).tolist() == np.cumsum(weights).tolist()


def test_nothing_to_sample() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


def test_what_is_no_number_fails_alone() -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1, 4] = math.nan
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, logprobs=2)):
        states = [state_of(sampling, [1], 1, seq_id=seq_id) for seq_id in (7, 8, 9)]
        sampled = sample(rows, states)
        assert sampled[1] == NOT_A_NUMBER
        assert [sampled[0], sampled[2]] == sample(rows[[0, 2]], [states[0], states[2]])


def test_the_tokens_of_the_contract() -> None:
    vectors = list(draws())
    assert len(vectors) == 12
    for logits, states, tokens in vectors:
        assert [one.token_id for one in sample(torch.tensor([logits] * len(states)), states)] == tokens
