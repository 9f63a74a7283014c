"""Chooses the tokens of a step: the plain ones in NumPy, many at once, the others row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, SequenceState
from pagekv.executor.backend.row_sampler import Float64s, sample_row
from pagekv.executor.backend.sampling import is_plain

# Rows that are looked at together. NumPy has no bfloat16, and float32 of all rows would take twice the memory of the
# logits: 620 MB for a thousand rows of 152,000 tokens.
ROWS_AT_ONCE = 32
# Of fewer, torch takes longer to be called than NumPy to add.
FEW_WEIGHTS = 4096


def sample(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each state, from its row of `logits` `[len(states), vocab_size]`; NOT_A_NUMBER for a row that
    has a NaN.
    """
    found: list[Sampled] = []
    for first in range(0, len(states), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        found += _sample(logits[rows], states[rows])
    return found


def _sample(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    # Of equals the first, and a NaN where there is one. NumPy takes a tenth of torch's time; it has no bfloat16.
    numbers = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    best = numbers.argmax(axis=-1)
    wrong = np.isnan(numbers[np.arange(len(best)), best])
    greedy_ids: list[int] = np.where(wrong, NOT_A_NUMBER.token_id, best).tolist()
    return [
        Sampled(token_id) if is_plain(state) else sample_row(row, state, _sums)
        for row, state, token_id in zip(numbers, states, greedy_ids, strict=True)
    ]


def _sums(weights: Float64s) -> Float64s:
    """As `np.cumsum`, to the last bit, in a quarter of its time: that one reads each sum from memory again."""
    if len(weights) < FEW_WEIGHTS:
        return weights.cumsum()
    sums: Float64s = torch.from_numpy(weights).cumsum(0).numpy()
    return sums
