"""Which sequences a step's tokens end, and why: their last token, end-of-sequence, or a stop token of their own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch, Rows
from pagekv.kvmanager.scheduling.step_plan import Ending


def check_stop(
    batch: DecodeBatch, rows: Rows, tokens: NDArray[np.uint32], known: NDArray[np.int32], eos: tuple[int, ...]
) -> dict[int, Ending]:
    """Which rows end with the token they just got, by position in `rows`. `known`: how many tokens each has now."""
    full = known > batch.last_input[batch.span(rows)]
    is_eos = _is_any(tokens, eos)
    if np.count_nonzero(is_eos):
        is_eos &= known >= batch.eos_from[rows]
    stopped = batch.stopped(rows, tokens, known)
    if not (stopped or np.count_nonzero(full | is_eos)):
        return {}
    endings = {position: Ending(FinishReason.LENGTH) for position in np.flatnonzero(full).tolist()}
    for position in [*np.flatnonzero(is_eos).tolist(), *stopped]:
        endings[position] = Ending(FinishReason.STOP, int(tokens[position]))
    return endings


def _is_any(tokens: NDArray[np.uint32], wanted: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which of the tokens are one of a few; faster than `np.isin` for these."""
    found = tokens == wanted[0] if wanted else np.zeros(len(tokens), np.bool_)
    for token in wanted[1:]:
        found |= tokens == token
    return found
