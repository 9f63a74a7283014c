"""Sequences that wait for admission, in order of (priority, arrival, index): FCFS within a priority."""

from __future__ import annotations

import heapq

from pagekv.kvmanager.sequence import Sequence, SequenceState


class WaitingQueue:
    """A heap with lazy removal: entries whose sequence is no longer WAITING are dropped when they surface.

    A preempted sequence keeps its key, so it stands before everything of its priority that arrived later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence whose state is WAITING."""
        heapq.heappush(self._heap, (sequence.key, sequence))
        self._length += 1

    def head(self) -> Sequence | None:
        """The next to admit, or None."""
        while self._heap and self._heap[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the head; call right after `head` returned it."""
        self._length -= 1
        return heapq.heappop(self._heap)[1]

    def forget(self) -> None:
        """Counts one waiting sequence less that has just been finished; its entry is dropped when it surfaces."""
        self._length -= 1
