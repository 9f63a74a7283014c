"""Seconds between the tokens of each sequence, for all sequences of a step at once.

In steady state the same sequences get a token in every step, so all of them have waited for as long: one observation
with a weight. Times are kept only for sequences that had no token in the latest step.
"""

from __future__ import annotations

from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq


class InterTokenLatency:
    """Feeds a histogram. A sequence that comes back after a preemption or a lost executor has waited since its latest
    token, too.
    """

    def __init__(self, histogram: Histogram) -> None:
        """`histogram` takes the gaps."""
        self._histogram = histogram
        # Sequences that got a token in the latest step, in its order, and when that was.
        self._latest: list[Seq] = []
        self._latest_set: set[Seq] = set()
        self._latest_at = 0.0
        # Seconds: the latest token of every other live sequence that has one.
        self._last: dict[Seq, float] = {}

    def take(self, sequences: list[Seq], now: float) -> list[int]:
        """Counts a token for each sequence; returns the positions of the sequences that got their first."""
        if not sequences:
            return []
        first: list[int] = []
        before = self._latest_set
        if sequences == self._latest:
            stayed = len(sequences)
        else:
            self._latest, self._latest_set = sequences, set(sequences)
            self._last |= dict.fromkeys(before - self._latest_set, self._latest_at)
            stayed = len(before & self._latest_set)
            for position, sequence in enumerate(sequences) if stayed < len(sequences) else ():
                if sequence not in before:
                    last = self._last.pop(sequence, None)
                    if last is None:
                        first.append(position)
                    else:
                        self._histogram.observe(now - last)
        if stayed:
            self._histogram.observe(now - self._latest_at, stayed)
        self._latest_at = now
        return first

    def finish(self, request: LiveRequest) -> None:
        """Removes a request that has ended."""
        for sequence in request.sequences:
            self._last.pop(sequence, None)
            if sequence in self._latest_set:
                self._latest_set.remove(sequence)
                self._latest = []
