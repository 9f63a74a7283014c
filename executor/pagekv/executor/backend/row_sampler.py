"""Chooses a token in NumPy: a pure function of (logits, seed, sequence index, position) and the tokens so far.

Order: logit bias, ban until min_tokens, penalties, temperature, top-k, top-p (of what top-k left), min-p, one draw. The
draw is one number of a counter-based hash, and looks the token up in the cumulative distribution **in order of token
id**: logits that differ by rounding, as they do from one batch to another, then almost never change what is drawn.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, Sampling, SequenceState
from pagekv.executor.backend.sampling import banned_tokens, changes_logits, uniform

Float64s = npt.NDArray[np.float64]


def sample_row(raw: Float64s, state: SequenceState) -> Sampled:
    """The next token of a sequence from its logits `[vocab_size]`, which are not changed; NOT_A_NUMBER where one of
    them is NaN. A backend that samples all its rows so has every feature of sampling, and SAMPLER for its name.
    """
    # Of logits with NaN argmax finds the first NaN.
    if np.isnan(raw[raw.argmax()]):
        return NOT_A_NUMBER
    sampling = state.sampling
    logits = adjust(raw, state) if changes_logits(state) else raw
    if sampling.temperature == 0:
        token_id = int(logits.argmax())
    else:
        weights = filtered_weights(logits, sampling)
        token_id = draw(weights, uniform(sampling.seed, sampling.sequence_index, len(state.token_ids)))
    if sampling.logprobs is None:
        return Sampled(token_id)
    logprobs = log_softmax(raw)
    top = tuple((int(index), float(logprobs[index])) for index in largest(raw, sampling.logprobs))
    return Sampled(token_id, float(logprobs[token_id]), top)


def adjust(raw: Float64s, state: SequenceState) -> Float64s:
    """Logits with bias, ban and penalties; a new array."""
    sampling, logits = state.sampling, raw.copy()
    for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
        logits[token_id] += bias
    logits[list(banned_tokens(state, len(logits)))] = -np.inf
    if sampling.repetition_penalty != 1:
        seen = np.unique(state.token_ids)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token_id, count in Counter(state.token_ids[state.num_prompt_tokens :]).items():
            logits[token_id] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return logits


def filtered_weights(logits: Float64s, sampling: Sampling) -> Float64s:
    """Unnormalised probabilities by token id at this temperature (above 0); 0 for what top-k, top-p and min-p exclude.

    Of equally likely tokens, those with the lower ids are kept.
    """
    weights: Float64s = np.exp(_below_largest(logits) / sampling.temperature)
    if 0 < sampling.top_k < len(weights):
        kept = np.zeros_like(weights)
        best = largest(logits, sampling.top_k)
        kept[best] = weights[best]
        weights = kept
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    if sampling.min_p > 0:
        # The likeliest token has weight 1.
        weights = np.where(weights >= sampling.min_p, weights, 0.0)
    return weights


def _nucleus(weights: Float64s, top_p: float) -> Float64s:
    """The fewest largest weights whose sum is at least `top_p` of all."""
    goal = top_p * weights.cumsum()[-1]
    # A nucleus is nearly always a few tokens: sorting the whole vocabulary is the last resort.
    for num_sorted in (256, 4096, len(weights)):
        order = largest(weights, num_sorted)
        cumulative = weights[order].cumsum()
        if cumulative[-1] >= goal:
            break
    count = int(np.searchsorted(cumulative, goal)) + 1
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    return kept


def draw(weights: Float64s, number: float) -> int:
    """The token id at `number`, in [0, 1), of the distribution that `weights` describe."""
    cumulative = weights.cumsum()
    token_id = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    # Rounding may take the product up to the total.
    return token_id if token_id < len(weights) else int(np.flatnonzero(weights)[-1])


def largest(values: Float64s, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, of equals the lower index first."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    count = min(count, len(values))
    bound = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def log_softmax(logits: Float64s) -> Float64s:
    """Natural-log probabilities."""
    shifted = _below_largest(logits)
    result: Float64s = shifted - np.log(np.exp(shifted).sum())
    return result


def _below_largest(logits: Float64s) -> Float64s:
    """The logits less the largest; of an infinite one, 0 for those that are as large and minus infinity for others."""
    largest_logit = logits.max()
    if np.isinf(largest_logit):
        return np.where(logits == largest_logit, 0.0, -np.inf)
    below: Float64s = logits - largest_logit
    return below
