"""Seconds between the tokens of each sequence, for all sequences of a step at once.

In steady state the same sequences get a token in every step, so all of them have waited for as long: one observation
with a weight. Where the step before had others, the times of their latest tokens are read from a column by seq_id, and
only for a sequence that enters the executor is anything done one by one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np

from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import NewSeq

_NONE = np.empty(0, np.int64)


class InterTokenLatency:
    """A sequence that comes back after a preemption or a lost executor has waited since its latest token, too."""

    def __init__(self, histogram: Histogram) -> None:
        """`histogram` takes the gaps."""
        self._histogram = histogram
        # Seconds, by seq_id: the latest token of its owner, NaN before the first.
        self._last = np.full(64, math.nan)
        # By seq_id: who had it last.
        self._owners: list[Seq | None] = [None] * 64
        self._seq_ids: dict[Seq, int] = {}
        # Latest tokens of sequences whose seq_id has gone to another.
        self._away: dict[Seq, float] = {}
        # The step before gave these a token at that time, which is not in the column yet.
        self._latest: list[int] = []
        self._latest_rows = _NONE
        self._latest_at = 0.0

    def open(self, new: Iterable[NewSeq]) -> None:
        """Sequences that entered the executor with the step whose tokens are taken next."""
        self._settle()
        for entered in new:
            sequence, seq_id = entered.sequence, entered.seq_id
            while seq_id >= len(self._owners):
                self._last = np.append(self._last, np.full(len(self._owners), math.nan))
                self._owners += [None] * len(self._owners)
            last = self._leave(sequence)
            owner = self._owners[seq_id]
            if owner is not None:
                self._away[owner] = self._leave(owner)
            self._last[seq_id] = last
            # Beams come and go, and none of their tokens is final before the end.
            if sequence.request.search is None:
                self._owners[seq_id] = sequence
                self._seq_ids[sequence] = seq_id

    def take(self, seq_ids: list[int], now: float) -> list[int]:
        """A token for each of these, ascending; returns the positions of those that got their first."""
        if not seq_ids:
            return []
        if seq_ids == self._latest:
            self._histogram.observe(now - self._latest_at, len(seq_ids))
            self._latest_at = now
            return []
        self._settle()
        # Through an array, which takes a third of the time.
        rows = np.frombuffer(array("q", seq_ids), np.int64)
        gaps = now - self._last[rows]
        first = np.isnan(gaps)
        self._histogram.observe_all(gaps[~first])
        self._latest, self._latest_rows, self._latest_at = seq_ids, rows, now
        positions: list[int] = np.flatnonzero(first).tolist()
        return positions

    def forget(self, request: LiveRequest) -> None:
        """It has ended."""
        for sequence in request.sequences:
            self._leave(sequence)

    def _settle(self) -> None:
        """Writes the column."""
        self._last[self._latest_rows] = self._latest_at
        self._latest, self._latest_rows = [], _NONE

    def _leave(self, sequence: Seq) -> float:
        """Takes a sequence out; the time of its latest token."""
        seq_id = self._seq_ids.pop(sequence, None)
        if seq_id is None:
            return self._away.pop(sequence, math.nan)
        self._owners[seq_id] = None
        return float(self._last[seq_id])
