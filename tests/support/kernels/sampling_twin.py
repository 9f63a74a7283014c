"""The sampler's kernel in NumPy, for many draws of one row at a time: the same integers, in another order.

Beside it the reference, `row_sampler` in float64, likewise; and where the reference is within rounding of a tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend import row_sampler
from pagekv.executor.backend.interface import Sampling
from pagekv.kernels.sampling import NONE, min_weight, scales, top_p_share

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

FRACTION_BITS = 22
LAST_KEY = 45 << FRACTION_BITS
COEFFICIENTS = (
    "0x1.b49554p-13",
    "0x1.4cb7bp-10",
    "0x1.3c487cp-7",
    "0x1.c69f98p-5",
    "0x1.ebfc3ep-3",
    "0x1.62e43p-1",
    "0x1p0",
)
# Neighbouring ids that are drawn from together.
GROUP = 256
# Sums and weights whose ratio differs from 1 by less than this are a tie. A weight is off by half a step of its key and
# 1.1 * 2^-24, together 1.5e-7; a share, which is a quotient of sums of them, by twice that.
TIE = 2.0**-21


def fma(a: Floats, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """`a * b + c`, rounded once (80-bit floats hold the product, and round the sum far below a float's last place)."""
    result: Floats = (a.astype(np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)).astype(
        np.float32
    )
    return result


def keys(logits: Floats, temperature: float) -> Words:
    """Distances to the likeliest token, in fixed point `[vocab_size]`; no logit is NaN."""
    high_scale, low_scale = map(np.float32, scales(temperature))
    best = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):
        distance = best - logits
        high = distance * high_scale
        far = ~(high < np.float32(45))
        distance, high = np.where(far, np.float32(0), distance), np.where(far, np.float32(0), high)
        near = np.where(far, best, logits)
        back = distance - best
        error = (best - (distance - back)) - (near + back)
    rest = fma(error, high_scale, fma(distance, low_scale, fma(distance, high_scale, -high)))
    whole = np.rint(high)
    steps = np.rint(((high - whole) + rest).astype(np.float64) * 2**FRACTION_BITS)
    found = np.clip(whole.astype(np.int64) * 2**FRACTION_BITS + steps.astype(np.int64), 0, LAST_KEY)
    found[far] = LAST_KEY
    found[logits == best] = 0
    result: Words = found.astype(np.uint64)
    return result


def weights(of: Words) -> Words:
    """2^-distance of these keys, in units of 2^-44."""
    up = (of.astype(np.int64) + 2**FRACTION_BITS - 1) >> FRACTION_BITS
    x = (((up << FRACTION_BITS) - of.astype(np.int64)) / 2**FRACTION_BITS).astype(np.float32)
    power = np.full_like(x, float.fromhex(COEFFICIENTS[0]))
    for coefficient in COEFFICIENTS[1:]:
        power = fma(power, x, np.float32(float.fromhex(coefficient)))
    mantissa = (power.view(np.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    result: Words = (mantissa.astype(np.uint64) << np.uint64(21)) >> up.astype(np.uint64)
    return result


def kept_weights(logits: Floats, sampling: Sampling) -> Words:
    """Weights by token id, 0 for what top-k, top-p and min-p exclude; temperature above 0."""
    found = keys(logits, sampling.temperature)
    held = weights(found)
    ranked: Ids = np.lexsort((np.arange(len(logits)), found))
    if 0 < sampling.top_k < len(logits):
        ranked = ranked[: sampling.top_k]
    if top_p_share(sampling.top_p) != NONE:
        sums = held[ranked].cumsum()
        target = int(sums[-1]) * top_p_share(sampling.top_p) >> 64
        ranked = ranked[: int(np.searchsorted(sums, np.uint64(target), side="right")) + 1]
    kept = np.zeros_like(held)
    kept[ranked] = held[ranked]
    kept[kept < np.uint64(min_weight(sampling.min_p))] = 0
    return kept


def exponentials(keys: Words, numbers: Ids) -> Doubles:
    """The random numbers `[n, m]` of the draws with `keys` `[n]` for `numbers` `[m]` or `[n, m]`."""
    bits = keys[:, None] + np.broadcast_to(numbers, (len(keys), numbers.shape[-1])).astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    odd: Doubles = ((bits >> np.uint64(12)) * np.uint64(2) + np.uint64(1)).astype(np.float64)
    found: Doubles = -np.log(odd / 2**53)
    return found


def race(held: npt.NDArray[np.generic], keys: Words, numbers: Ids) -> tuple[Ids, Bools]:
    """The winners `[n]`, as places, of the draws with `keys` among weights `[n, m]` or `[m]`; and whether another place
    is within rounding of the winner.
    """
    scores = held.astype(np.float64) / exponentials(keys, numbers)
    winners = scores.argmax(axis=1)
    if scores.shape[1] == 1:
        return winners, np.zeros(len(keys), np.bool_)
    second, first = np.partition(scores, -2, axis=1)[:, -2:].T
    return winners, second > (1 - TIE) * first


def draws(kept: npt.NDArray[np.generic], keys: Words) -> tuple[Ids, Bools]:
    """The tokens that `keys` draw by these weights, and whether another one is within rounding."""
    grouped = np.pad(kept, (0, -len(kept) % GROUP)).reshape(-1, GROUP)
    totals, found = grouped.sum(axis=1), []
    # Some at a time, because arrays that fit the cache take a third of the time.
    for some in np.array_split(keys, len(keys) // 200 + 1):
        groups, tied = race(totals, some, 2**32 + np.arange(len(totals)))
        tokens, near = race(grouped[groups], some, groups[:, None] * GROUP + np.arange(GROUP))
        found.append((groups * GROUP + tokens, tied | near))
    token_ids, ties = zip(*found, strict=True)
    return np.concatenate(token_ids), np.concatenate(ties)


@dataclass(frozen=True)
class Reference:
    """The same in float64."""

    kept: Doubles
    """Weights by token id, 0 for what is excluded."""
    tied: bool
    """Whether a filter is within rounding of keeping other tokens."""


def reference(logits: Floats, sampling: Sampling) -> Reference:
    """The reference for one row."""
    exact = logits.astype(np.float64)
    _, everything = row_sampler.candidates(exact, Sampling(temperature=sampling.temperature))
    tied, order = False, np.argsort(-exact, kind="stable")
    if 0 < sampling.top_k < len(exact):
        last, next_one = (everything[order[sampling.top_k + at]] for at in (-1, 0))
        tied |= bool(last * (1 - TIE) < next_one < last)
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        sums = everything[order].cumsum()
        tied |= bool((np.abs(sums / sums[-1] - sampling.top_p) < TIE).any())
    if sampling.min_p > 0:
        tied |= bool((np.abs(everything - sampling.min_p) < TIE * everything).any())
    token_ids, kept = row_sampler.candidates(exact, sampling)
    weights = np.zeros_like(everything)
    weights[slice(None) if token_ids is None else token_ids] = kept
    return Reference(weights, tied)
