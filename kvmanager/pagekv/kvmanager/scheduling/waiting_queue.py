"""Sequences that hold no blocks: those that wait for admission, in order of (rank, arrival, index), and for a fork."""

from __future__ import annotations

import heapq

from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus

# Entries of sequences that no longer wait which are never worth clearing.
DEAD_ENTRIES = 64


class WaitingQueue:
    """A heap with lazy removal: entries whose sequence is no longer WAITING are dropped when they surface.

    Where others always come first they would never surface, so the heap is cleared of them once they are most of it.
    A preempted sequence keeps its key, so it stands before everything of its priority that arrived later. The queue
    outlives the executor.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Seq]] = []
        self._length = 0
        # Sequences in the state FORKING.
        self.num_forking = 0
        # Requests whose sequence 0 was admitted while others wait for its prompt.
        self.forking: list[LiveRequest] = []

    def __len__(self) -> int:
        return self._length

    def add(self, request: LiveRequest) -> None:
        """Queues sequence 0 of a new request; the others wait for a fork."""
        self.push(request.sequences[0])
        self.num_forking += len(request.sequences) - 1

    def push(self, sequence: Seq) -> None:
        """Makes a sequence that holds nothing wait for admission."""
        sequence.state = SeqStatus.WAITING
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

    def remove(self, sequence: Seq) -> None:
        """Ends a sequence that waits."""
        if sequence.state is SeqStatus.FORKING:
            self.num_forking -= 1
            sequence.state = SeqStatus.FINISHED
            return
        sequence.state = SeqStatus.FINISHED
        self._length -= 1
        if len(self._heap) > 2 * self._length + DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].state is SeqStatus.WAITING]
            heapq.heapify(self._heap)

    # -- forks

    def expect_fork(self, request: LiveRequest) -> None:
        """Sequence 0 was admitted: once the prompt is computed, the sequences that wait for that can be forked."""
        if any(sequence.state is SeqStatus.FORKING for sequence in request.sequences):
            self.forking.append(request)

    def take_children(self, request: LiveRequest) -> list[Seq]:
        """The sequences of a request that wait for a fork, which wait no longer: the caller holds or pushes them."""
        if request in self.forking:
            self.forking.remove(request)
        children = [sequence for sequence in request.sequences if sequence.state is SeqStatus.FORKING]
        self.num_forking -= len(children)
        return children
