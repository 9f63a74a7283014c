"""Where the keys of a prompt row are split, and which partial results are merged to its result (split-KV prefill)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagekv.kernels.tensors import Ints


@dataclass(frozen=True)
class SplitRule:
    """Where a row's keys are cut: at multiples of a length from position 0. The number of keys that the row sees
    decides the length, never its chunk or its batch, so that the bits of its result depend on the row alone."""

    most_whole: int
    """Rows that see at most so many keys are not split."""
    least_log2: int
    """Log2 of the shortest length, which is a multiple of every tile's keys."""
    most_splits: int
    """The most splits of a row, plus one if a window begins within a split. If a row would have more, its splits are
    twice as long, and so on."""

    def classes(self, most_visible: int) -> list[tuple[int, int]]:
        """(least number of visible keys, log2 of the length; 0: whole), for rows that see up to `most_visible` keys."""
        found, least, log2 = [(0, 0)], self.most_whole + 1, self.least_log2
        while least <= most_visible:
            found.append((least, log2))
            least, log2 = (self.most_splits << log2) + 1, log2 + 1
        return found

    def splits(self, window: int) -> bool:
        """Whether any row of a layer with this window (0: none) is split."""
        return window == 0 or window > self.most_whole

    def most_partials(self, context_len: int, window: int = 0) -> int:
        """The most partial results of a row in a context of up to `context_len` keys; 0 if it is not split. `window`:
        how many keys the row sees; 0: all."""
        visible = min(context_len, window or context_len)
        return self.most_splits + (visible < context_len) if visible > self.most_whole else 0


SPLIT_RULE = SplitRule(most_whole=8192, least_log2=11, most_splits=16)
"""Rows of up to 8,192 keys are whole, so that prompts of that length have no partial results. Beyond, splits of 2,048
keys and more give a short chunk 5 to 16 times the thread blocks, and cost a long one some percent (a prediction)."""


def row_merges(runs: Ints, past: Ints, first_row: Ints, window: int, num_rows: int) -> Ints:
    """[num_rows, 4] by row of the step: row (-1: not split), first partial, partials, split of the first partial.

    `runs` [r, 4], for rows that are split: place, first query, end query, log2 of splits. `past`, `first_row`: position
    and row of each place's first query. The partial results of rows are side by side, in order.
    """
    run, offset = repeated(runs[:, 2] - runs[:, 1])
    place, query, log2 = runs[run, 0], runs[run, 1] + offset, runs[run, 3]
    position, row = past[place] + query, first_row[place] + query
    first_split = oldest_visible(position, window) >> log2
    partials = (position >> log2) - first_split + 1
    merges = np.full((num_rows, 4), -1, np.int32)
    merges[row] = np.stack([row, np.cumsum(partials) - partials, partials, first_split], axis=1)
    return merges


def partial_bytes(num_heads: int, head_size: int) -> int:
    """Bytes of one partial result of all heads: outputs, then (maximum, sum) pairs, float32."""
    return num_heads * (head_size + 2) * 4


def oldest_visible(position: Ints, window: int) -> Ints:
    """The first position that queries at these positions see."""
    return np.maximum(position - window + 1, 0) if window else np.zeros_like(position)


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Each index, repeated as often as its count says, and the number of each repetition, from 0 on."""
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return index, (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
