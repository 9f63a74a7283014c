"""The oracle's arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.executor.executor_steps import VOCAB
from support.executor.expected_tokens import chain, choose_token, expected_tokens, mix

from pagekv.executor.backend.interface import Sampling
from pagekv.executor.oracle import reference
from pagekv.executor.oracle.reference import EOS_ONE_IN, FIRST, choose_tokens, extend_chains, likeliest, num_kept

PROMPT = list(range(100, 110))


def test_chains_are_the_recurrence_however_they_are_cut() -> None:
    rng = random.Random(7)
    tokens = [rng.randrange(2**32) for _ in range(600)]
    for cuts in ([600], [1, 599], [8, 9, 583], [1] * 600):
        found: list[int] = []
        for length in cuts:
            states = np.array([found[-1] if found else FIRST], np.uint64)
            next_tokens = np.array(tokens[len(found) : len(found) + length], np.uint64)
            found += extend_chains(states, next_tokens, np.array([length])).tolist()
        assert found == chain(tokens)
    assert reference.mix(np.array(tokens, np.uint64)).tolist() == [mix(token) for token in tokens]


def test_many_at_once_are_as_each_alone() -> None:
    rng = random.Random(8)
    words = [[rng.randrange(2**64) for _ in range(300)] for _ in range(2)]
    tokens = [rng.randrange(2**20) for _ in range(300)]
    runs = [[rng.randrange(2**20) for _ in range(rng.randint(1, 20))] for _ in words[0]]
    states = extend_chains(
        np.array(words[0], np.uint64),
        np.array([token for run in runs for token in run], np.uint64),
        np.array([len(run) for run in runs]),
    )
    assert states.tolist() == [h for run, state in zip(runs, words[0], strict=True) for h in chain(run, state)]
    for eos in ((), (0,), (3, 9)):
        drawing = [rng.random() < 0.5 for _ in tokens]
        chosen, drawn = choose_tokens(
            np.array(words[0], np.uint64),
            np.array(tokens, np.uint64),
            vocab_size=512,
            eos_token_ids=eos,
            drawing=np.array(drawing),
            seeds=np.array(words[1], np.uint64),
            indices=np.array([row % 4 for row in range(300)], np.uint64),
        )
        assert list(zip(chosen.tolist(), drawn.tolist(), strict=True)) == [
            choose_token(
                words[0][row],
                tokens[row],
                vocab_size=512,
                eos_token_ids=eos,
                temperature=float(drawing[row]),
                seed=words[1][row],
                sequence_index=row % 4,
            )
            for row in range(300)
        ]


def test_known_answers() -> None:
    """Fixed for good: recorded outputs in other tests and processes depend on it."""
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0
    assert expected_tokens([1, 2, 3], 8, vocab_size=512) == [199, 16, 183, 246, 467, 249, 31, 368]
    sampled = expected_tokens([1, 2, 3], 8, vocab_size=512, temperature=0.7, seed=5, sequence_index=1)
    assert sampled == [432, 506, 39, 55, 6, 95, 199, 361]


def test_every_choice_depends_on_the_whole_prefix() -> None:
    outputs = {tuple(expected_tokens([*PROMPT[:i], 1, *PROMPT[i + 1 :]], 6, vocab_size=VOCAB)) for i in range(10)}
    assert len(outputs) == 10


def test_seed_index_and_position_matter_above_temperature_zero_only() -> None:
    def choose(position: int = 9, temperature: float = 0.0, seed: int = 0, index: int = 0) -> int:
        return choose_token(
            12345, position, vocab_size=2**31, temperature=temperature, seed=seed, sequence_index=index
        )[0]

    assert choose() == choose(seed=3, index=2) == choose(position=10)
    different = {choose(temperature=1.0, position=position, seed=seed) for position in (9, 10) for seed in (0, 3)}
    assert len(different | {choose(), choose(temperature=1.0, index=2)}) == 6
    assert choose(temperature=1.0, seed=2**64 - 1) == choose(temperature=0.5, seed=2**64 - 1)


def test_end_of_sequence_comes_about_as_often_as_said() -> None:
    ends = sum(choose_token(i, 0, vocab_size=2**31, eos_token_ids=(7, 8))[0] in (7, 8) for i in range(64_000))
    assert 0.8 * 64_000 / EOS_ONE_IN < ends < 1.2 * 64_000 / EOS_ONE_IN


def test_expected_tokens_end_at_stop_tokens_and_not_before_min_tokens() -> None:
    free = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,), ignore_eos=True)
    short = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,))
    assert short == free[: free.index(0) + 1]
    stopped = expected_tokens(PROMPT, 300, vocab_size=64, stop_token_ids=(free[2],), ignore_eos=True)
    assert stopped == free[: free.index(free[2]) + 1]
    later = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,), stop_token_ids=(1,), min_tokens=40)
    assert len(later) >= 40
    assert not {0, 1} & set(later[:40])
    assert later[-1] in (0, 1) or len(later) == 300


def test_banned_tokens_are_avoided_unless_all_are_banned() -> None:
    for read in range(200):
        banned = [t for t in range(8) if t != read % 8]
        assert choose_token(read, 0, vocab_size=8, banned=banned)[0] == read % 8
    assert choose_token(1, 0, vocab_size=4, banned=[0, 1, 2, 3])[0] in range(4)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, lambda weights: 3),
        ({"top_k": VOCAB}, len),
        ({"min_p": 0.3}, lambda weights: sum(weight >= 0.3 for weight in weights)),
        ({"min_p": 1.0}, lambda weights: 1),
        ({"top_p": 0.6}, lambda weights: fewest(weights, 0.6)),
        ({"top_p": 1e-6}, lambda weights: 1),
        ({"top_p": 0.6, "top_k": 5}, lambda weights: fewest(weights[:5], 0.6)),
        ({"top_p": 0.9, "min_p": 0.5}, lambda weights: min(fewest(weights, 0.9), sum(w >= 0.5 for w in weights))),
    ],
)
def test_filters_keep_as_many_of_the_likeliest_as_they_say(
    temperature: float, options: dict[str, Any], kept: Callable[[list[float]], int]
) -> None:
    """By the log-probabilities that the oracle reports."""
    logprobs = [logprob for _, logprob in likeliest(5, 100, VOCAB, VOCAB)]
    weights = [math.exp((logprob - logprobs[0]) / temperature) for logprob in logprobs]
    assert num_kept(Sampling(temperature=temperature, **options), VOCAB) == kept(weights)


def fewest(weights: list[float], share: float) -> int:
    """How many of the first weights it takes for this share of all."""
    goal = share * sum(weights)
    return next(n for n in range(1, len(weights) + 1) if sum(weights[:n]) >= goal)


def test_likeliest_tokens_of_two_prefixes_interleave_and_sum_exactly_in_float32() -> None:
    """Beam search needs continuations of several beams among the best."""
    tops = [likeliest(token, drawn, VOCAB, 4) for token, drawn in ((5, 100), (511, 700))]
    assert [token for token, _ in tops[1]] == [511, 0, 1, 2]
    merged = sorted(((logprob, row) for row, top in enumerate(tops) for _, logprob in top), reverse=True)
    assert {row for _, row in merged[:4]} == {0, 1}
    assert all(np.float32(logprob) == logprob for logprob, _ in merged)
