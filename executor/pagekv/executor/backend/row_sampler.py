"""Chooses a token in NumPy: a pure function of (logits, seed, sequence index, position) and the tokens so far.

Order: logit bias, ban until min_tokens, penalties, temperature, top-k, top-p (of what top-k left), min-p, one draw. The
draw is one number of a counter-based hash, and looks the token up in the cumulative distribution **in order of token
id**: logits that differ by rounding, as they do from one batch to another, then almost never change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, Sampling, SequenceState
from pagekv.executor.backend.sampling import banned_tokens, changes_logits, uniform

Float64s = npt.NDArray[np.float64]
# Logits as a model gives them.
Floats = npt.NDArray[np.float32 | np.float64]
Ids = npt.NDArray[np.int64]
# Sums of weights from the first on, each that of the one before and one weight, as `np.cumsum` gives them.
Sums = Callable[[Float64s], Float64s]
# A nucleus is nearly always found among so many of the largest weights.
FEW = 256
# Weights are at most 1. Bins for them: each a 64th of a power of two wide, with one for all below 2^-64.
BIN_SHIFT = 52 - 6
LEAST_BIN = (1023 - 64) << 6
# Above 0.
LEAST_WEIGHT = math.ulp(0.0)


def sample_row(raw: Floats, state: SequenceState, sums: Sums = np.cumsum) -> Sampled:
    """The next token of a sequence from its logits `[vocab_size]`, which are not changed; NOT_A_NUMBER where one of
    them is NaN. A backend that samples all its rows so has every feature of sampling, and SAMPLER for its name. `sums`:
    for one that has what is faster.
    """
    # Of logits with NaN argmax finds the first NaN.
    if np.isnan(raw[raw.argmax()]):
        return NOT_A_NUMBER
    sampling = state.sampling
    logits = adjust(raw, state) if changes_logits(state) else raw
    if sampling.temperature == 0:
        token_id = int(logits.argmax())
    else:
        number = uniform(sampling.seed, sampling.sequence_index, len(state.token_ids))
        token_id = draw(*candidates(logits, sampling, sums), number, sums)
    if sampling.logprobs is None:
        return Sampled(token_id)
    top = largest(raw, sampling.logprobs)
    own, *others = logprobs(raw, [token_id, *top.tolist()])
    return Sampled(token_id, own, tuple(zip(top.tolist(), others, strict=True)))


def adjust(raw: Floats, state: SequenceState) -> Float64s:
    """Logits with bias, ban and penalties; a new array."""
    sampling, logits = state.sampling, raw.astype(np.float64)
    for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
        logits[token_id] += bias
    logits[list(banned_tokens(state, len(logits)))] = -np.inf
    # A token that is there twice is given the same value twice. To make sets of tokens, or count them in Python, takes
    # milliseconds for a long text, in each step.
    if sampling.repetition_penalty != 1:
        seen = np.asarray(state.token_ids, np.int64)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        outputs = np.asarray(state.token_ids[state.num_prompt_tokens :], np.int64)
        count = np.bincount(outputs)[outputs]
        logits[outputs] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return logits


def candidates(logits: Floats, sampling: Sampling, sums: Sums = np.cumsum) -> tuple[Ids | None, Float64s]:
    """Tokens that top-k, top-p and min-p keep at this temperature (above 0), in order of their ids, None for all; and
    their unnormalised probabilities.

    Of equally likely tokens, those with the lower ids are kept.
    """
    token_ids, peak = None, float(logits.max())
    if 0 < sampling.top_k < len(logits):
        token_ids = np.sort(largest(logits, sampling.top_k))
        logits = logits[token_ids]
    # In place, since a vocabulary takes a megabyte and more.
    weights = _below(logits, peak)
    weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        token_ids, weights = _only(_nucleus(weights, sampling.top_p, sums), token_ids, weights)
    if sampling.min_p > 0:
        # The likeliest token has weight 1.
        token_ids, weights = _only(np.flatnonzero(weights >= sampling.min_p), token_ids, weights)
    return token_ids, weights


def _only(kept: Ids, token_ids: Ids | None, weights: Float64s) -> tuple[Ids, Float64s]:
    return kept if token_ids is None else token_ids[kept], weights[kept]


def _nucleus(weights: Float64s, top_p: float, sums: Sums) -> Ids:
    """Where the fewest largest weights are whose sum is at least `top_p` of all, in order."""
    goal = top_p * float(sums(weights)[-1])
    # At low temperatures fewer have any weight.
    held, places = 0.0, np.flatnonzero(weights >= max(_reached_by(weights, FEW), LEAST_WEIGHT))
    falling = np.sort(weights[places])[::-1]
    if falling.cumsum()[-1] < goal:
        held, places = _border(weights, goal)
        falling = np.sort(weights[places])[::-1]
    count = min(int(np.searchsorted(held + falling.cumsum(), goal)) + 1, len(falling))
    last = falling[count - 1]
    kept = weights > last
    # The last of the nucleus may have equals, of which only the first belong to it.
    equals = places[weights[places] == last]
    kept[equals[: count - int((falling > last).sum())]] = True
    return np.flatnonzero(kept)


def _border(weights: Float64s, goal: float) -> tuple[float, Ids]:
    """The weights are put into bins by size, and added from the largest on: the sum of those bins before the one with
    which the sum reaches the goal, and where the weights of this one are. Takes a tenth of the time of sorting them.
    """
    # Bits of numbers that are not negative order as these do.
    bins = (weights.view(np.int64) >> BIN_SHIFT) - LEAST_BIN
    np.maximum(bins, 0, out=bins)
    totals = np.bincount(bins, weights)
    cumulative = totals[::-1].cumsum()
    # Added in another order than the goal, they may not reach it.
    place = int(np.searchsorted(cumulative, min(goal, cumulative[-1])))
    held = float(cumulative[place - 1]) if place else 0.0
    return held, np.flatnonzero(bins == len(totals) - 1 - place)


def draw(token_ids: Ids | None, weights: Float64s, number: float, sums: Sums = np.cumsum) -> int:
    """The token at `number`, in [0, 1), of the distribution that `weights` of `token_ids` (None: of all) describe."""
    cumulative = sums(weights)
    place = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    if place == len(weights):
        # Rounding may take the product up to the total.
        place = int(np.flatnonzero(weights)[-1])
    return place if token_ids is None else int(token_ids[place])


def largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, largest first, of equals the lower index first."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    places = np.flatnonzero(values >= _reached_by(values, count))
    return places[np.argsort(-values[places], kind="stable")][:count]


def _reached_by(values: Floats, count: int) -> float:
    """A number that at least `count` of the values reach, all where there are fewer, and seldom twice as many."""
    if count >= len(values):
        return float(values.min())
    # The largest of each of twice as many groups, in a tenth of the time that partitioning all values takes.
    groups = 2 * count
    rows = len(values) // groups
    if rows > 1:
        values = values[: rows * groups].reshape(rows, groups).max(axis=0)
    return float(np.partition(values, len(values) - count)[len(values) - count])


def logprobs(logits: Floats, token_ids: list[int]) -> list[float]:
    """Natural-log probabilities of some tokens."""
    below = _below(logits, float(logits.max()))
    found: list[float] = (below[token_ids] - np.log(np.exp(below).sum())).tolist()
    return found


def _below(logits: Floats, peak: float) -> Float64s:
    """The logits less the largest, in a new array; of an infinite one, 0 for those that are as large and minus infinity
    for others.
    """
    if np.isinf(peak):
        return np.where(logits == peak, 0.0, -np.inf)
    below: Float64s = logits.astype(np.float64)
    below -= peak
    return below
