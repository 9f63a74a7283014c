"""The rules of sampling that all backends share: the random number, and which rules apply to a sequence."""

from __future__ import annotations

import hashlib
import struct

from pagekv.executor.backend.interface import Sampling, SequenceState


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments in every process and release."""
    key = struct.pack("<QIQ", seed, sequence_index, position)
    digest = hashlib.blake2b(key, digest_size=8, person=b"pagekv sampling").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


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
