"""Samples a token in NumPy: a pure function of (logits, seed, sequence index, position) and the tokens so far.

Order: logit bias, ban until min_tokens, penalties, temperature, top-k, top-p (of the tokens that top-k left), min-p,
one draw. The draw is an exponential race, the Gumbel-max trick in another form: each token has a random number from a
counter-based hash, and the largest weight / number wins. So logits that differ by rounding, as they do from batch to
batch, almost never change the token. One number, looked up in the cumulative distribution, would not do: rounding moves
the bounds of all tokens, and those of unlikely tokens lie closer together than it moves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, Sampling, SequenceState
from pagekv.executor.backend.sampling import (
    FIRST_GROUP,
    GROUP_SIZE,
    banned_tokens,
    changes_logits,
    draw_key,
    exponentials,
)

Float64s = npt.NDArray[np.float64]
# Logits as a model gives them.
Floats = npt.NDArray[np.float32 | np.float64]
Ids = npt.NDArray[np.int64]
# A cumulative sum, added in order, with the same bits as `np.cumsum`.
Sums = Callable[[Float64s], Float64s]
# A nucleus is nearly always among this many of the largest weights.
FEW = 256
# So many tokens, or fewer, are drawn from as a list, more as a vocabulary most of which weighs nothing.
FEW_KEPT = 1024
# Bins for weights, which are at most 1: 64 bins for each power of two, and one bin for all weights below 2^-64.
BIN_SHIFT = 52 - 6
LEAST_BIN = (1023 - 64) << 6
# The least number above 0.
LEAST_WEIGHT = math.ulp(0.0)


def sample_row(raw: Floats, state: SequenceState, sums: Sums = np.cumsum) -> Sampled:
    """The next token of a sequence from its logits `[vocab_size]`, which are not changed; NOT_A_NUMBER if one of them
    is NaN. A backend that samples all rows with this function has every feature of sampling and may call its sampler
    SAMPLER. `sums`: a faster cumulative sum, if the backend has one.
    """
    # If there are NaNs, argmax finds the first.
    if np.isnan(raw[raw.argmax()]):
        return NOT_A_NUMBER
    sampling = state.sampling
    logits = adjust(raw, state) if changes_logits(state) else raw
    if sampling.temperature == 0:
        token_id = int(logits.argmax())
    else:
        key = draw_key(sampling.seed, sampling.sequence_index, len(state.token_ids))
        token_id = draw(*candidates(logits, sampling, sums), key)
    if sampling.logprobs is None:
        return Sampled(token_id)
    top = largest(raw, sampling.logprobs)
    own, *others = logprobs(raw, [token_id, *top.tolist()])
    return Sampled(token_id, own, tuple(zip(top.tolist(), others, strict=True)))


def adjust(raw: Floats, state: SequenceState) -> Float64s:
    """The logits with biases, bans and penalties, in a new array."""
    sampling, logits = state.sampling, raw.astype(np.float64)
    for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
        logits[token_id] += bias
    logits[list(banned_tokens(state, len(logits)))] = -np.inf
    # A token that occurs twice gets the same value twice. Making a set of tokens, or counting them in Python, would
    # take milliseconds in each step for a long text.
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
    """The tokens that top-k, top-p and min-p keep at this temperature (above 0), in order of id, None for all tokens;
    and their unnormalised probabilities.

    Of equally likely tokens, those with the lower ids are kept.
    """
    token_ids, peak = None, float(logits.max())
    if 0 < sampling.top_k < len(logits):
        token_ids = np.sort(largest(logits, sampling.top_k))
        logits = logits[token_ids]
    # In place, because an array over the vocabulary takes a megabyte or more.
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
    """The indices, in order, of the fewest largest weights whose sum is at least `top_p` of the sum of all."""
    goal = top_p * float(sums(weights)[-1])
    # LEAST_WEIGHT: at low temperatures fewer than FEW weights are above 0.
    held, places = 0.0, np.flatnonzero(weights >= max(_reached_by(weights, FEW), LEAST_WEIGHT))
    falling = np.sort(weights[places])[::-1]
    if falling.cumsum()[-1] < goal:
        held, places = _border(weights, goal)
        falling = np.sort(weights[places])[::-1]
    count = min(int(np.searchsorted(held + falling.cumsum(), goal)) + 1, len(falling))
    last = falling[count - 1]
    kept = weights > last
    # Several weights may equal the last one of the nucleus. Only the first of them belong to it.
    equals = places[weights[places] == last]
    kept[equals[: count - int((falling > last).sum())]] = True
    return np.flatnonzero(kept)


def _border(weights: Float64s, goal: float) -> tuple[float, Ids]:
    """Finds the bin of weights in which the sum, taken from the largest weight down, reaches the goal. Returns the sum
    of the bins before it, and the indices of the weights in it. Takes a tenth of the time of sorting all weights.
    """
    # The bits of non-negative floats, read as integers, have the same order as the floats.
    bins = (weights.view(np.int64) >> BIN_SHIFT) - LEAST_BIN
    np.maximum(bins, 0, out=bins)
    totals = np.bincount(bins, weights)
    cumulative = totals[::-1].cumsum()
    # The bins are summed in another order than the goal was, so their sum may stay just below it.
    place = int(np.searchsorted(cumulative, min(goal, cumulative[-1])))
    held = float(cumulative[place - 1]) if place else 0.0
    return held, np.flatnonzero(bins == len(totals) - 1 - place)


def draw(token_ids: Ids | None, weights: Float64s, key: int) -> int:
    """The token that `key` draws from the distribution `weights` over `token_ids`, in order of id (None: all tokens).

    Two races give the distribution of one: the first between groups of neighbouring ids, the second between the tokens
    of the winner. So a draw from V tokens takes V / GROUP_SIZE + GROUP_SIZE random numbers and logarithms, not V.
    """
    if token_ids is not None and len(token_ids) > FEW_KEPT:
        return draw(None, np.bincount(token_ids, weights).astype(np.float64, copy=False), key)
    if token_ids is None:
        totals = np.add.reduceat(weights, np.arange(0, len(weights), GROUP_SIZE))
        first = _winner(totals, key, FIRST_GROUP) * GROUP_SIZE
        return first + _winner(weights[first : first + GROUP_SIZE], key, first)
    groups = token_ids // GROUP_SIZE
    of_groups, of_tokens = exponentials(key, np.stack((FIRST_GROUP + groups, token_ids)))
    winner = groups[(np.bincount(groups, weights)[groups] / of_groups).argmax()]
    return int(token_ids[np.where(groups == winner, weights / of_tokens, 0.0).argmax()])


def _winner(weights: Float64s, key: int, first: int) -> int:
    """The place of the winner among weights whose numbers in the draw follow each other from `first`."""
    return int((weights / exponentials(key, np.arange(first, first + len(weights)))).argmax())


def largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, largest first; of equal values the lower index comes first."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    places = np.flatnonzero(values >= _reached_by(values, count))
    return places[np.argsort(-values[places], kind="stable")][:count]


def _reached_by(values: Floats, count: int) -> float:
    """A bound that at least `count` of the values reach (all, if there are fewer), but seldom twice as many."""
    if count >= len(values):
        return float(values.min())
    # Partitions the largest values of 2 * count groups, in a tenth of the time that partitioning all values takes.
    groups = 2 * count
    rows = len(values) // groups
    if rows > 1:
        values = values[: rows * groups].reshape(rows, groups).max(axis=0)
    return float(np.partition(values, len(values) - count)[len(values) - count])


def logprobs(logits: Floats, token_ids: list[int]) -> list[float]:
    """The natural logarithms of the probabilities of `token_ids`."""
    below = _below(logits, float(logits.max()))
    found: list[float] = (below[token_ids] - np.log(np.exp(below).sum())).tolist()
    return found


def _below(logits: Floats, peak: float) -> Float64s:
    """The logits minus the largest, `peak`, in a new array. If that is infinite: 0 for logits that equal it, minus
    infinity for the others.
    """
    if np.isinf(peak):
        return np.where(logits == peak, 0.0, -np.inf)
    below: Float64s = logits.astype(np.float64)
    below -= peak
    return below
