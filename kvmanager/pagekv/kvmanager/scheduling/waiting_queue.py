"""Sequences that wait for admission, in order of (priority, arrival, index): FCFS within a priority."""

from __future__ import annotations

import heapq

from pagekv.kvmanager.scheduling.sequence import Seq, SeqStatus

# Entries of sequences that no longer wait which are never worth clearing.
DEAD_ENTRIES = 64


class WaitingQueue:
    """A heap with lazy removal: entries whose sequence is no longer WAITING are dropped when they surface.

    Where others always come first they would never surface, so the heap is cleared of them once they are most of it.
    A preempted sequence keeps its key, so it stands before everything of its priority that arrived later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Seq]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Seq) -> None:
        """Adds a sequence whose state is WAITING."""
        heapq.heappush(self._heap, (sequence.key, sequence))
        self._length += 1

    def head(self) -> Seq | None:
        """The next to admit, or None."""
        while self._heap and self._heap[0][1].state is not SeqStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Seq:
        """Takes the head; call right after `head` returned it."""
        self._length -= 1
        return heapq.heappop(self._heap)[1]

    def forget(self) -> None:
        """Counts one sequence less, which has just left the state WAITING; its entry is dropped when it surfaces."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].state is SeqStatus.WAITING]
            heapq.heapify(self._heap)
