"""Sequences that hold no blocks: those that wait for admission, in order of (rank, arrival, index), and for a fork."""

from __future__ import annotations

from bisect import bisect_left, insort

from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus, key


class WaitingQueue:
    """A sorted list. A preempted sequence keeps its key, so it stands before everything of its priority that arrived
    later. The queue outlives the executor.
    """

    def __init__(self) -> None:
        self._order: list[Seq] = []
        # Sequences in the state FORKING.
        self.num_forking = 0
        # Requests whose sequence 0 was admitted while others wait for its prompt.
        self.forking: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, request: LiveRequest) -> None:
        """Queues sequence 0 of a new request; the others wait for a fork."""
        self.push(request.sequences[0])
        self.num_forking += len(request.sequences) - 1

    def push(self, sequence: Seq) -> None:
        """Makes a sequence that holds nothing wait for admission."""
        sequence.state = SeqStatus.WAITING
        insort(self._order, sequence, key=key)

    @property
    def order(self) -> list[Seq]:
        """The next to admit first. Not to be changed."""
        return self._order

    def head(self) -> Seq | None:
        """The next to admit, or None."""
        return self._order[0] if self._order else None

    def pop(self) -> Seq:
        """Takes the head."""
        return self._order.pop(0)

    def remove(self, sequence: Seq) -> None:
        """Ends a sequence that waits."""
        if sequence.state is SeqStatus.FORKING:
            self.num_forking -= 1
        else:
            del self._order[bisect_left(self._order, sequence.key, key=key)]
        sequence.state = SeqStatus.FINISHED

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
