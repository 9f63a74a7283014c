"""Where the keys of a prompt's row are split, and which split rows a step computes at a time (split-KV prefill)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagekv.kernels.shared_splits import Ints

MOST_PARTIAL_BYTES = 128 << 20
"""Partial results of a pass, at most: of some 2,000 thread blocks, several for each one that an H200 runs at a time.
Steps with more take several passes, over the same memory."""


@dataclass(frozen=True)
class SplitRule:
    """Where a row's keys are cut: at multiples of a length from position 0. The number of keys that the row sees
    decides the length, never its chunk or its batch, so that the bits of its result depend on the row alone."""

    most_whole: int
    """Rows that see at most so many keys are not split."""
    least_log2: int
    """Log2 of the shortest length, which is a multiple of every tile's keys."""
    most_splits: int
    """Of a row, but for one more where a window begins within a split; beyond, splits are twice as long, and so on."""

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
        """The most partial results of a row of at most so many keys, of which it sees a window's; 0: all."""
        visible = min(context_len, window or context_len)
        return self.most_splits + (visible < context_len) if visible > self.most_whole else 0


SPLIT_RULE = SplitRule(most_whole=8192, least_log2=11, most_splits=16)
"""Rows of up to 8,192 keys are whole, so that prompts of that length have no partial results. Beyond, splits of 2,048
keys and more give a short chunk 5 to 16 times the thread blocks, and cost a long one some percent (a prediction)."""


@dataclass(frozen=True)
class SplitRows:
    """The rows of a step that are split: n queries in order, one at least, each with all its heads."""

    place: Ints
    """[n]: of its sequence, among those that were planned."""
    query: Ints
    """[n]: of the sequence."""
    log2: Ints
    """[n]: of the length of its splits."""
    first_split: Ints
    partials: Ints
    """[n]: number of its splits."""
    number_of_pass: Ints
    """[n]: 0 and up, never falls."""
    first_partial: Ints
    """[n]: in the memory of its pass."""

    @classmethod
    def of(cls, runs: Ints, past: Ints, window: int, pass_partials: int, tile_queries: int) -> SplitRows:
        """`runs` [r, 4]: place, first query, end query, log2. `past`: position of each place's first query. Passes have
        whole tiles of so many queries where all have as many partial results."""
        run, offset = repeated(runs[:, 2] - runs[:, 1])
        place, query, log2 = runs[run, 0], runs[run, 1] + offset, runs[run, 3]
        position = past[place] + query
        first = oldest_visible(position, window) >> log2
        partials = (position >> log2) - first + 1
        before = np.cumsum(partials) - partials
        # Passes begin so many partial results apart, or more by less than one query's.
        most = int(partials.max())
        apart = max(pass_partials - most + 1, 1)
        apart -= apart % (most * tile_queries) if apart > most * tile_queries else 0
        number_of_pass = np.unique(before // apart, return_inverse=True)[1].reshape(-1).astype(np.int32)
        begins = before[np.searchsorted(number_of_pass, number_of_pass)]
        return cls(place, query, log2, first, partials, number_of_pass, before - begins)

    @property
    def num_passes(self) -> int:
        return int(self.number_of_pass[-1]) + 1

    @property
    def num_partials(self) -> int:
        """Of a pass, at most."""
        return int((self.first_partial + self.partials).max())

    def runs(self) -> tuple[Ints, Ints]:
        """[r, 4]: place, first query, end query, log2, of neighbours of one sequence, length and pass; [r]: passes."""
        alike = np.stack([self.place, self.log2, self.number_of_pass], axis=1)
        begin = np.flatnonzero(np.concatenate([[True], (alike[1:] != alike[:-1]).any(axis=1)]))
        last = np.concatenate([begin[1:], [len(alike)]]) - 1
        runs = [self.place[begin], self.query[begin], self.query[last] + 1, self.log2[begin]]
        return np.stack(runs, axis=1).astype(np.int32), self.number_of_pass[begin]


def partial_bytes(num_heads: int, head_size: int) -> int:
    """Bytes of one partial result of all heads: outputs, then (maximum, sum) pairs, float32."""
    return num_heads * (head_size + 2) * 4


def oldest_visible(position: Ints, window: int) -> Ints:
    """The first position that queries at these positions see."""
    return np.maximum(position - window + 1, 0) if window else np.zeros_like(position)


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Each index as often as its count says, and the number of the repetition from 0 on."""
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return index, (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
