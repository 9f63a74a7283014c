"""Sequences that came back together and share blocks which one of them has yet to compute.

Of the sequences of a request one computes what is common; the others hold the same blocks meanwhile and enter the
executor once all they share is computed by a planned step. If the one that computes it leaves before, another takes its
place.
"""

from __future__ import annotations

from typing import NamedTuple

from pagekv.kvmanager.scheduling.sequence import Seq


class _Lead(NamedTuple):
    """Who computes what a follower shares, and the position behind the last that it shares."""

    leader: Seq
    end: int


class SharedPrefill:
    """Of the sequences of one epoch. `num_computed` of a follower counts what its leader has yet to compute."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leads: dict[Seq, _Lead] = {}

    def follow(self, sequence: Seq, leader: Seq, end: int) -> None:
        """From now on the sequence waits until positions before `end`, in blocks that it shares, are computed."""
        if self._written(leader) < end:
            self._leads[sequence] = _Lead(leader, end)

    def is_ready(self, sequence: Seq) -> bool:
        """Whether planned steps compute all that it counts as computed."""
        lead = self._leads.get(sequence)
        if lead is None:
            return True
        if self._written(lead.leader) < lead.end:
            return False
        del self._leads[sequence]
        return True

    def _written(self, sequence: Seq) -> int:
        """Positions from the first on that planned steps have computed."""
        lead = self._leads.get(sequence)
        if lead is None or (written := self._written(lead.leader)) >= lead.end:
            return sequence.num_computed
        return written

    def hand_over(self, sequence: Seq) -> None:
        """Before a sequence leaves: it counts only what is truly computed, and of its followers the one that shares
        most with it computes what it would have.
        """
        if not self._leads:
            return
        written = self._written(sequence)
        lead = self._leads.pop(sequence, None)
        if lead is not None and written < lead.end:
            self._count(sequence, written)
        else:
            lead = None
        followers = [(other.end, follower) for follower, other in self._leads.items() if other.leader is sequence]
        heir: Seq | None = None
        for end, follower in sorted(followers, key=lambda pair: -pair[0]):
            if heir is not None and written < end:
                self._leads[follower] = _Lead(heir, end)
                continue
            del self._leads[follower]
            if written < end:
                heir = follower
                self._count(heir, written if lead is None else min(end, lead.end))
                if lead is not None:
                    self._leads[heir] = _Lead(lead.leader, heir.num_computed)

    def _count(self, sequence: Seq, computed: int) -> None:
        sequence.num_computed = computed
        sequence.num_published = min(sequence.num_published, computed // self._block_size)
