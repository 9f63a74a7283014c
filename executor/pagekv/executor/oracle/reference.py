"""The oracle's arithmetic: digests of slots and the next token, as pure functions of the token sequence.

Position p of a sequence has the digest mix(h_p) with h_p = h_(p-1) * FACTOR + mix(token_p) in 64 bits, so the digest
depends on the whole sequence up to p. The sum of the digests of positions 0 to p stands for the keys and values that
attention reads at p, and the next token is a function of this sum. This module knows nothing of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import Sampling

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

MASK = 2**64 - 1
# Odd, so that it has an inverse modulo 2**64 and runs of positions can be computed at once.
FACTOR = 0xD1342543DE82EF95
INVERSE = pow(FACTOR, -1, 2**64)
FIRST = 0x243F6A8885A308D3
# On average one sampled token in this many is an end-of-sequence token, if the model has one.
EOS_ONE_IN = 64


def mix(values: Words) -> Words:
    """The finaliser of splitmix64 applied to each value: every bit of the result depends on every bit of the value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def spread(counts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """For consecutive runs of `counts` elements (each at least 1): the run of every element, its place within the run,
    and the index of the first element of each run.
    """
    firsts = np.cumsum(counts) - counts
    runs = np.repeat(np.arange(len(counts)), counts)
    return runs, np.arange(len(runs)) - firsts[runs], firsts


def extend_chains(states: Words, token_ids: Words, counts: Numbers) -> Words:
    """h of every position, `[sum(counts)]`: chain i is at h = `states[i]` (FIRST if it is empty) and continues with the
    next `counts[i]` tokens.
    """
    runs, places, firsts = spread(counts)
    most = int(counts.max())
    powers: Words = np.cumprod(np.full(most, FACTOR, np.uint64), dtype=np.uint64)
    inverses: Words = np.cumprod(np.full(most, INVERSE, np.uint64), dtype=np.uint64)
    terms = mix(token_ids) * inverses[places]
    sums: Words = np.cumsum(terms, dtype=np.uint64)
    before = sums[firsts] - terms[firsts]
    return powers[places] * (sums + (states - before)[runs])


def choose_tokens(
    reads: Words,
    positions: Words,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    drawing: npt.NDArray[np.bool_],
    seeds: Words,
    indices: Words,
) -> tuple[Words, Words]:
    """The tokens at `positions`, given the sums `reads` of digests (modulo 2**64); and the numbers from which the
    tokens were made.

    `drawing`: where the temperature is above 0; only there seeds and sequence indices matter. All `[sequences]`.
    """
    for parts in (seeds, indices, positions):
        reads = np.where(drawing, mix(reads ^ mix(parts)), reads)
    drawn = mix(reads)
    tokens = drawn % np.uint64(vocab_size)
    if eos_token_ids:
        ends = mix(drawn) % np.uint64(EOS_ONE_IN) == 0
        eos = np.array(eos_token_ids, np.uint64)[drawn % np.uint64(len(eos_token_ids))]
        tokens = np.where(ends, eos, tokens)
    return tokens, drawn


def num_kept(sampling: Sampling, vocab_size: int) -> int:
    """How many of the likeliest tokens top_k, top_p and min_p keep at a temperature above 0. As in `likeliest`, each
    token's log-probability is 1/8 below that of the next likelier token.
    """
    kept = min(sampling.top_k or vocab_size, vocab_size)
    fall = 1 / (8 * sampling.temperature)
    if sampling.top_p < 1:
        # The first n tokens have the share 1 - exp(-fall * n) of the weight of infinitely many tokens.
        kept = min(kept, math.ceil(-math.log1p(sampling.top_p * math.expm1(-fall * kept)) / fall))
    if sampling.min_p > 0:
        kept = min(kept, math.floor(-math.log(sampling.min_p) / fall) + 1)
    return max(kept, 1)


def likeliest(token: int, drawn: int, vocab_size: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with log-probabilities, best first; `token` and `drawn` are the greedy choice and
    its number from `choose_tokens`.

    The values are invented but deterministic: the greedy token comes first, then the ids after it. The first
    log-probability varies between prefixes by about two steps of this list, so that beams of a search take each other's
    continuations. Every sum of log-probabilities of likely tokens is exact in float32 and float64.
    """
    likely = ((token + rank) % vocab_size for rank in range(min(count, vocab_size)))
    return tuple((one, logprob_of(one, token, drawn, vocab_size)) for one in likely)


def logprob_of(token: int, greedy: int, drawn: int, vocab_size: int) -> float:
    """The log-probability of any token; `greedy` and `drawn` are the greedy choice and its number from
    `choose_tokens`.
    """
    return -(drawn % 1024) / 4096 - (token - greedy) % vocab_size / 8
