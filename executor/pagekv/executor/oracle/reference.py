"""The oracle's arithmetic: digests of slots and the next token, as pure functions of the token sequence.

Position p of a sequence has the digest mix(h_p) with h_p = h_(p-1) * FACTOR + mix(token_p) in 64 bits, so it stands for
the whole sequence up to p. The sum of the digests of positions 0..p stands for what attention reads at p, and the next
token is a function of it. Nothing here knows of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

MASK = 2**64 - 1
# Odd, so that it has an inverse modulo 2**64 and runs of positions can be computed at once.
FACTOR = 0xD1342543DE82EF95
INVERSE = pow(FACTOR, -1, 2**64)
FIRST = 0x243F6A8885A308D3
# One sampled token in so many is an end-of-sequence token, if there is one.
EOS_ONE_IN = 64

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    value = (value + _GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK
    return value ^ (value >> 31)


def mix_all(values: Words) -> Words:
    """`mix` of every element."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def extend_chain(state: int, token_ids: Sequence[int]) -> tuple[Words, int]:
    """Digests `[len(token_ids)]` of positions that continue a chain in `state` (FIRST for an empty chain), and the
    chain's new state.
    """
    if len(token_ids) <= 8:
        # Decodes come one token at a time, where an array costs more than it saves.
        digests = []
        for token in token_ids:
            state = (state * FACTOR + mix(token)) & MASK
            digests.append(mix(state))
        return np.array(digests, np.uint64), state
    powers: Words = np.cumprod(np.full(len(token_ids), FACTOR, np.uint64), dtype=np.uint64)
    inverses: Words = np.cumprod(np.full(len(token_ids), INVERSE, np.uint64), dtype=np.uint64)
    sums: Words = np.cumsum(mix_all(np.array(token_ids, np.uint64)) * inverses, dtype=np.uint64)
    states: Words = powers * (sums + np.uint64(state))
    return mix_all(states), int(states[-1])


def extend_chains(states: Words, token_ids: Words) -> tuple[Words, Words]:
    """`extend_chain` of many sequences by one token each: their digests and new states, all of shape [sequences]."""
    states = states * np.uint64(FACTOR) + mix_all(token_ids)
    return mix_all(states), states


def choose_token(
    read: int,
    position: int,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    banned: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    sequence_index: int = 0,
) -> tuple[int, int]:
    """The token at `position` after digests that sum to `read` (modulo 2**64), and the number it was drawn from.

    Seed and index matter only above temperature 0. A banned choice moves on to the next id that is not banned.
    """
    if temperature > 0:
        for part in (seed, sequence_index, position):
            read = mix(read ^ mix(part))
    drawn = mix(read)
    token = drawn % vocab_size
    if eos_token_ids and mix(drawn) % EOS_ONE_IN == 0:
        token = eos_token_ids[drawn % len(eos_token_ids)]
    if token in banned:
        forbidden = set(banned)
        token = next(
            (t % vocab_size for t in range(token, token + vocab_size) if t % vocab_size not in forbidden), token
        )
    return token, drawn


def choose_tokens(
    reads: Words,
    positions: Words,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    drawing: npt.NDArray[np.bool_],
    seeds: Words,
    indices: Words,
) -> Words:
    """`choose_token` of many sequences, nothing banned. `drawing` says where the temperature is above 0; `seeds` and
    `indices` are the mixes of seed and sequence index. All of shape [sequences].
    """
    for parts in (seeds, indices, mix_all(positions)):
        reads = np.where(drawing, mix_all(reads ^ parts), reads)
    drawn = mix_all(reads)
    tokens = drawn % np.uint64(vocab_size)
    if eos_token_ids:
        ends = mix_all(drawn) % np.uint64(EOS_ONE_IN) == 0
        eos = np.array(eos_token_ids, np.uint64)[drawn % np.uint64(len(eos_token_ids))]
        tokens = np.where(ends, eos, tokens)
    return tokens


def likeliest(token: int, drawn: int, vocab_size: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with log-probabilities, best first, where `token` was chosen by the number `drawn`.

    Made up but deterministic: the chosen token comes first, then the ids after it. The first log-probability differs
    from prefix to prefix by about as much as two ranks do, so that the beams of a search take continuations from each
    other. Every sum of log-probabilities is exact in float32 and float64.
    """
    logprob = -(drawn % 1024) / 4096
    return tuple(((token + rank) % vocab_size, logprob - rank / 8) for rank in range(min(count, vocab_size)))
