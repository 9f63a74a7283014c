"""Chooses the tokens of a step: the plain ones in NumPy, all at once, the others row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, SequenceState
from pagekv.executor.backend.row_sampler import sample_row
from pagekv.executor.backend.sampling import is_plain


def sample(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each state, from its row of `logits` `[len(states), vocab_size]`; NOT_A_NUMBER for a row that
    has a NaN.
    """
    if not states:
        return []
    # Of equals the first, and a NaN where there is one. NumPy takes a tenth of torch's time; it has no bfloat16.
    numbers = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    best = numbers.argmax(axis=-1)
    wrong = np.isnan(numbers[np.arange(len(best)), best])
    greedy_ids: list[int] = np.where(wrong, NOT_A_NUMBER.token_id, best).tolist()
    return [
        Sampled(token_id) if is_plain(state) else sample_row(row, state)
        for row, state, token_id in zip(numbers, states, greedy_ids, strict=True)
    ]
