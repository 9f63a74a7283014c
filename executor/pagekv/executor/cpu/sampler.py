"""Samples the tokens of a step: plain greedy rows many at once in NumPy, all others row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, SequenceState
from pagekv.executor.backend.row_sampler import Float64s, sample_row
from pagekv.executor.backend.sampling import is_plain

# Rows sampled at a time. NumPy has no bfloat16, and converting all rows to float32 would take twice the memory of the
# logits: 620 MB for a thousand rows of 152,000 tokens.
ROWS_AT_ONCE = 32
# For fewer weights, calling torch takes longer than NumPy's sum.
FEW_WEIGHTS = 4096


def sample(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each state, from its row of `logits` `[len(states), vocab_size]`; NOT_A_NUMBER for a row with
    a NaN.
    """
    found: list[Sampled] = []
    for first in range(0, len(states), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        found += _sample(logits[rows], states[rows])
    return found


def _sample(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    # argmax returns the first of equal values, and a NaN if there is one. NumPy takes a tenth of torch's time.
    numbers = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    greedy_ids: list[int] = numbers.argmax(axis=-1).tolist()
    found: list[Sampled] = []
    for number, (state, token_id) in enumerate(zip(states, greedy_ids, strict=True)):
        if not is_plain(state):
            found.append(sample_row(numbers[number], state, _sums))
        else:
            found.append(NOT_A_NUMBER if math.isnan(numbers.item(number, token_id)) else Sampled(token_id))
    return found


def _sums(weights: Float64s) -> Float64s:
    """`np.cumsum` with the same bits in a quarter of the time: NumPy's reads each sum back from memory."""
    if len(weights) < FEW_WEIGHTS:
        return weights.cumsum()
    sums: Float64s = torch.from_numpy(weights).cumsum(0).numpy()
    return sums
