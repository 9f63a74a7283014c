"""The sampler of one row; tests/unit/executor/cpu/test_sampler.py holds the same function against a slow twin."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from support.clients.stack import environment
from support.executor.sampler_vectors import draws

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampling, SequenceState
from pagekv.executor.backend.row_sampler import adjust, candidates, draw, largest, sample_row
from pagekv.executor.backend.sampling import draw_key


def test_the_tokens_of_the_contract() -> None:
    vectors = list(draws())
    assert len(vectors) == 12
    for logits, states, tokens in vectors:
        row = np.array(logits)
        assert [sample_row(row, state).token_id for state in states] == tokens
        assert row.tolist() == logits


def test_what_is_no_number_is_marked() -> None:
    for kind in (Sampling(), Sampling(temperature=1.0, top_k=2, logprobs=2, presence_penalty=1.0)):
        state = SequenceState(1, [1], 1, [], 0, kind)
        assert sample_row(np.array([5.0, math.nan, 9.0]), state) is NOT_A_NUMBER
        assert sample_row(np.array([5.0, -math.inf, 9.0]), state).token_id in (0, 2)


@pytest.mark.parametrize(
    "kind",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_p=0.5),
        Sampling(temperature=1.0, min_p=0.5),
        Sampling(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1),
        Sampling(temperature=1e-45, top_p=1e-30),
    ],
)
@pytest.mark.parametrize(
    ("logits", "likeliest"),
    [
        ([5.0, math.inf, 9.0, -math.inf], {1}),
        ([5.0, math.inf, 9.0, math.inf], {1, 3}),
        ([-math.inf, -math.inf, -math.inf, -math.inf], {0, 1, 2, 3}),
    ],
)
def test_of_infinite_logits_the_largest_are_equally_likely(
    logits: list[float], likeliest: set[int], kind: Sampling
) -> None:
    """An overflow is a number: no other sequence's step may fail by it."""
    for seed in range(8):
        state = SequenceState(1, [1], 1, [], 0, replace(kind, seed=seed, logprobs=4))
        found = sample_row(np.array(logits), state)
        assert found.token_id in likeliest
        assert found.logprob == pytest.approx(-math.log(len(likeliest)))
        assert [token for token, logprob in found.top if logprob > -math.inf] == sorted(likeliest)


def test_draws_follow_the_distribution() -> None:
    of_all = candidates(np.log([0.1, 0.2, 0.3, 0.4]), Sampling(temperature=1.0))
    drawn = np.bincount([draw(*of_all, draw_key(3, 0, position)) for position in range(10_000)], minlength=4)
    assert drawn / 10_000 == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.02)


@pytest.mark.parametrize("kept", [1, 3, 40, 1024, 1025, 3000])
def test_a_list_of_tokens_is_drawn_from_as_a_vocabulary_is(kept: int) -> None:
    rng = np.random.default_rng(kept)
    token_ids, weights = np.sort(rng.choice(5000, kept, replace=False)), np.exp(rng.standard_normal(kept))
    everything = np.zeros(5000)
    everything[token_ids] = weights
    for key in range(100):
        assert draw(token_ids, weights, key) == draw(None, everything, key)


def test_draws_from_many_groups_follow_the_distribution() -> None:
    """By the sum of Pearson's test, whose mean is 999 and whose deviation 45; of many seeds, few exceed the bound."""
    weights = np.exp(2 * np.random.default_rng(1).standard_normal(1000))
    expected = 60_000 * weights / weights.sum()
    drawn = np.bincount([draw(None, weights, draw_key(1, 0, position)) for position in range(60_000)], minlength=1000)
    assert ((drawn - expected) ** 2 / expected).sum() < 1168


@pytest.mark.parametrize("vocab_size", [4096, 151_936])
def test_rounding_seldom_changes_a_draw(vocab_size: int) -> None:
    """Logits that differ by 1e-5 change probabilities by about as much, and so do draws. A number looked up in the
    cumulative weights would change 0.1 to 4 % of them.
    """
    rng, changed = np.random.default_rng(vocab_size), 0
    for slope in (1.2, 2.0):
        logits = -slope * np.log(rng.permutation(vocab_size) + 1)
        rounded = logits + 1e-5 * rng.standard_normal(vocab_size)
        one, other = (candidates(row, Sampling(temperature=1.0)) for row in (logits, rounded))
        changed += sum(draw(*one, key) != draw(*other, key) for key in range(3000))
    assert changed <= 2


# Vocabularies in which a few are looked for by groups, and those that are too small for it; flat and peaked ones, whose
# nuclei are found among 256 or by bins; equals within and across bounds; tokens that are ruled out.
@pytest.mark.parametrize("size", [1, 2, 511, 512, 1025, 8193, 30_000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 8.0])
@pytest.mark.parametrize("kind", ["plain", "rounded", "ruled out"])
def test_of_large_vocabularies_the_same_tokens_are_left(size: int, spread: float, kind: str) -> None:
    rng = np.random.default_rng(size)
    logits = (spread * rng.standard_normal(size)).astype(np.float32)
    if kind == "rounded":
        logits = logits.round(1)
    if kind == "ruled out":
        logits[rng.random(size) < 0.4] = -math.inf
    # At the lowest temperature nearly all weights are 0.
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.7, 1e-3), (0, 1, 50, 700), (1.0, 0.99, 0.5, 1e-9), (0.0, 0.1)
    ):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        token_ids, weights = candidates(logits, sampling)
        kept = np.arange(size) if token_ids is None else token_ids
        expected = plainly_left(logits, sampling)
        # Tokens that are ruled out weigh nothing, whether they are left or not.
        assert kept[weights > 0].tolist() == np.flatnonzero(expected).tolist()
        assert weights[weights > 0].tolist() == expected[expected > 0].tolist()
    assert largest(logits, 300).tolist() == np.argsort(-logits, kind="stable")[:300].tolist()


def test_a_nucleus_of_nearly_all_holds_all_where_rounding_keeps_the_sum_below_it() -> None:
    for seed in range(8):
        logits = (0.5 * np.random.default_rng(seed).standard_normal(5000)).astype(np.float32)
        token_ids, _ = candidates(logits, Sampling(temperature=1.0, top_p=math.nextafter(1, 0)))
        assert token_ids is not None
        assert len(token_ids) >= 4990


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_of_a_larger_array_is_read_alone(dtype: type[np.float32 | np.float64]) -> None:
    rows = np.random.default_rng(5).standard_normal((3, 9000)).astype(dtype)
    rows.flags.writeable = False
    kinds = [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.999, min_p=0.01, logprobs=3),
        Sampling(temperature=0.7, top_k=50, logprobs=3, presence_penalty=1.0, bias_token_ids=(5,), biases=(40.0,)),
    ]
    for kind in kinds:
        state = SequenceState(1, [1, 2], 1, [], 0, kind)
        assert sample_row(rows[1], state) == sample_row(rows[1].copy(), state)


def plainly_left(logits: npt.NDArray[np.float32], sampling: Sampling) -> npt.NDArray[np.float64]:
    """Weights of all tokens, 0 for those that are excluded, by sorting everything."""
    exact = logits.astype(np.float64)
    order = np.argsort(-exact, kind="stable")
    weights: npt.NDArray[np.float64] = np.exp((exact - exact.max()) / sampling.temperature)
    weights[order[sampling.top_k or len(order) :]] = 0.0
    if sampling.top_p < 1:
        falling = np.argsort(-weights, kind="stable")
        held = weights[falling].cumsum()
        weights[falling[int((held < sampling.top_p * weights.cumsum()[-1]).sum()) + 1 :]] = 0.0
    weights[weights < sampling.min_p] = 0.0
    return weights


@pytest.mark.parametrize("num_prompt", [1, 4000, 9000])
def test_penalties_of_long_texts_are_those_of_each_token(num_prompt: int) -> None:
    """To the last bit: tokens that are there often, once and never, also where nothing has been generated."""
    rng = np.random.default_rng(num_prompt)
    logits = rng.standard_normal(5000).astype(np.float32)
    logits[7], logits[8] = -math.inf, 0.0
    tokens = array("i", [7, 8, *np.minimum(rng.geometric(0.002, 8998) - 1, 4999).tolist()])
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.11)
    expected = logits.astype(np.float64).tolist()
    for token_id in set(tokens):
        value = expected[token_id]
        expected[token_id] = value / 1.3 if value > 0 else value * 1.3
    for token_id, count in Counter(tokens[num_prompt:]).items():
        expected[token_id] -= 0.7 + count * -0.11
    assert adjust(logits, SequenceState(1, tokens, num_prompt, [], 0, sampling)).tolist() == expected


def test_no_torch_is_loaded() -> None:
    """Backends that have no use for it need not install it."""
    code = "import sys, pagekv.executor.backend.row_sampler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=240)
