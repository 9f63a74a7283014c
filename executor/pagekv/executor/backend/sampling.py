"""The rules of sampling that all backends share: the random numbers, and which rules apply to a sequence."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import Sampling, SequenceState

# Tokens with neighbouring ids form groups of this size. In a draw, the number of a token is its id; that of a group is
# its place among all groups plus FIRST_GROUP.
GROUP_SIZE = 256
FIRST_GROUP = 2**32

# The constants of SplitMix64: what is added from number to number; then shifts and factors in turns, and a shift.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
_GOLDEN_GAMMA, _LAST_SHIFT, _TWELVE, _ONE = (np.uint64(value) for value in (GOLDEN_GAMMA, LAST_SHIFT, 12, 1))
_MIXES = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in MIXES)


def draw_key(seed: int, sequence_index: int, position: int) -> int:
    """The key of a draw: 64 random bits, the same for the same arguments in every process and release."""
    data = struct.pack("<QIQ", seed, sequence_index, position)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"pagekv sampling").digest(), "little")


def exponentials(key: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A random number above 0 for each of `numbers`, from the exponential distribution with mean 1. It depends on
    `key` and on its own number alone. The random bits are those of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    # In place, because most calls are for few numbers, and arrays take as long to make as to fill.
    bits = numbers.view(np.uint64) * _GOLDEN_GAMMA
    bits += np.uint64(key)
    for shift, factor in _MIXES:
        bits ^= bits >> shift
        bits *= factor
    bits ^= bits >> _LAST_SHIFT
    bits >>= _TWELVE
    # Odd, so that no number is 0 or 1 and all are exact.
    bits <<= _ONE
    bits |= _ONE
    found = bits.astype(np.float64)
    found *= 2.0**-53
    np.log(found, out=found)
    np.negative(found, out=found)
    return found


def is_plain(state: SequenceState) -> bool:
    """Whether the sequence is plain greedy: temperature 0, unchanged logits, no log-probabilities."""
    sampling = state.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not changes_logits(state)


def changes_logits(state: SequenceState) -> bool:
    """Whether biases, a ban or penalties change the logits."""
    sampling = state.sampling
    return bool(sampling.biases or is_penalised(sampling) or (sampling.banned_until_min and _is_banning(state)))


def is_penalised(sampling: Sampling) -> bool:
    """Whether penalties for tokens so far change the logits."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def banned_tokens(state: SequenceState, vocab_size: int) -> tuple[int, ...]:
    """The token ids that must not come next. Empty if the ban covers the whole vocabulary, since some token must."""
    banned = state.sampling.banned_until_min
    return banned if banned and _is_banning(state) and len(set(banned)) < vocab_size else ()


def _is_banning(state: SequenceState) -> bool:
    return len(state.token_ids) - state.num_prompt_tokens < state.sampling.min_tokens
