"""Splits that several rows of a step share, because their block tables name the same blocks there. Each is read once
for all these rows: cascade attention, in FlashInfer's words, but with the same kind of partial results as other splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pagekv.kernels.tensors import Ints

Flags = np.ndarray[Any, np.dtype[np.bool_]]

MIN_SAVED = 8
"""The fewest reads of splits that sharing must save in a step; if it saves fewer, nothing is shared. Sharing needs a
second launch in each layer, which costs about as much as reading some megabytes. The choice changes no bit."""


@dataclass(frozen=True)
class SharedSplits:
    """The shared splits of R rows."""

    order: Ints
    """[R]: the rows, in an order in which rows that share a split are neighbours."""
    runs: Ints
    """[n, 3]: place in `order` of the first row, number of rows (two or more), split."""
    covered: Flags
    """[R, D]: whether a split of a row is in a run; rows are in the order in which they were given."""

    @classmethod
    def none(cls, rows: int) -> SharedSplits:
        """Nothing is shared by so many rows."""
        return cls(np.arange(rows, dtype=np.int32), np.zeros((0, 3), np.int32), np.zeros((rows, 0), bool))


def shared_splits(tables: Ints, first: Ints, end: Ints, *, blocks_per_split: Ints, most: int) -> SharedSplits:
    """The splits that rows share, each in as few runs of at most `most` rows as there can be.

    `tables` [R, W]: block ids. `first`, `end` [R]: the splits [first, end) of a row are whole and wholly visible, and
    the ids of their blocks are valid. `blocks_per_split` [R]: rows in which it differs share none.
    """
    rows = len(tables)
    candidates = np.flatnonzero(end > first)
    if most < 2 or len(candidates) < 2:
        return SharedSplits.none(rows)
    # Equal prefixes are neighbours in any lexicographic order, that of the bytes included.
    width = int((end * blocks_per_split)[candidates].max())
    keys = np.ascontiguousarray(np.column_stack([blocks_per_split, tables[:, :width]])[candidates], np.int32)
    candidates = candidates[np.argsort(keys.view(np.dtype((np.void, keys.shape[1] * 4)))[:, 0], kind="stable")]
    order = np.concatenate([candidates, np.setdiff1d(np.arange(rows), candidates)]).astype(np.int32)
    low, high = _common(tables[candidates, :width], first[candidates], end[candidates], blocks_per_split[candidates])
    runs = _runs(low, high, most)
    if int((runs[:, 1] - 1).sum()) < MIN_SAVED:
        return SharedSplits.none(rows)
    covered = np.zeros((rows, int(runs[:, 2].max()) + 1), bool)
    for begin, count, split in runs.tolist():
        covered[order[begin : begin + count], split] = True
    return SharedSplits(order, runs, covered)


def _common(tables: Ints, first: Ints, end: Ints, blocks_per_split: Ints) -> tuple[Ints, Ints]:
    """[R - 1] each, for each pair of neighbouring rows: the splits [low, high) that both have in the same blocks."""
    low = np.maximum(first[:-1], first[1:])
    high = np.zeros_like(low)
    pairs = np.flatnonzero((tables[1:, 0] == tables[:-1, 0]) & (blocks_per_split[1:] == blocks_per_split[:-1]))
    same = tables[pairs + 1] == tables[pairs]
    blocks = np.where(same.all(axis=1), tables.shape[1], same.argmin(axis=1))
    high[pairs] = np.minimum(blocks // blocks_per_split[pairs], np.minimum(end[pairs], end[pairs + 1]))
    return low, high


def _runs(low: Ints, high: Ints, most: int) -> Ints:
    """Runs of rows whose neighbours share a split, for every split: [n, 3], as `SharedSplits.runs`."""
    bounds = np.unique(np.concatenate([low[high > low], high[high > low]]))
    found = []
    for begin, stop in pairwise(bounds.tolist()):
        linked = np.concatenate([[False], (low <= begin) & (high >= stop), [False]])
        edges = np.flatnonzero(linked[1:] != linked[:-1])
        for start, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            cuts = np.linspace(start, last + 1, -(-(last + 1 - start) // most) + 1).round().astype(int)
            found += [
                (int(a), int(b - a), split) for split in range(begin, stop) for a, b in pairwise(cuts) if b - a > 1
            ]
    return np.array(found, np.int32).reshape(-1, 3)
