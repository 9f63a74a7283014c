"""Work items of the decode and merge kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]

SPLIT_TOKENS = 512
"""Keys a work item walks over: a row's keys are cut at absolute multiples of this, whatever else is in the batch."""


@dataclass(frozen=True)
class DecodeWork:
    items: Ints
    """[n, 4]: row, sequence, split, partial (-1: the row has one split and its result goes straight out)."""
    merges: Ints
    """[m, 4]: row, first partial, number of partials, unused."""
    num_partials: int


def decode_work(*, rows: Ints, sequences: Ints, context_lens: Ints, window: int = 0) -> DecodeWork:
    """Items of the given decode rows, longest splits first. `window`: splits wholly before it are left out; 0: none."""
    first = np.maximum(context_lens - window, 0) // SPLIT_TOKENS if window else np.zeros_like(context_lens)
    splits = np.maximum(-(-context_lens // SPLIT_TOKENS) - first, 1)
    partials = np.where(splits > 1, splits, 0)
    start = np.cumsum(partials) - partials
    owner = np.repeat(np.arange(len(rows)), splits)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)
    items = np.stack(
        [rows[owner], sequences[owner], first[owner] + nth, np.where(splits[owner] > 1, start[owner] + nth, -1)], axis=1
    ).astype(np.int32)
    split_rows = splits > 1
    merges = np.stack([rows, start, splits, np.zeros_like(rows)], axis=1)[split_rows].astype(np.int32)
    return DecodeWork(items, merges, int(partials.sum()))
