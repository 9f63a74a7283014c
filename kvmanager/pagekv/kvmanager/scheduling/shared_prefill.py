"""Shared prefill: sequences of one request share blocks that one of them has yet to compute.

The leader computes the shared blocks. Its followers hold them meanwhile, and enter the executor once planned steps
compute all blocks that they share. If the leader leaves earlier, a follower takes its place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagekv.kvmanager.scheduling.block_tables import Arrival
from pagekv.kvmanager.scheduling.sequence import HOLDING, Seq, key


class _Lead(NamedTuple):
    """The sequence that computes a follower's shared blocks, and the position after the last shared one."""

    leader: Seq
    end: int


class SharedPrefill:
    """Followers and leaders of one epoch. A follower's `num_computed` includes what its leader has yet to compute."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leads: dict[Seq, _Lead] = {}

    def wait_for(self, leader: Seq, sequence: Seq, end: int) -> None:
        """Makes `sequence` wait until positions before `end`, in blocks that it shares with `leader`, are computed."""
        if self._written(leader) < end:
            self._leads[sequence] = _Lead(leader, end)

    def is_ready(self, sequence: Seq) -> bool:
        """Whether planned steps compute all that the sequence counts as computed."""
        lead = self._leads.get(sequence)
        if lead is None:
            return True
        if self._written(lead.leader) < lead.end:
            return False
        del self._leads[sequence]
        return True

    def _written(self, sequence: Seq) -> int:
        """Leading positions that planned steps compute."""
        lead = self._leads.get(sequence)
        if lead is None or (written := self._written(lead.leader)) >= lead.end:
            return sequence.num_computed
        return written

    def hand_over(self, sequence: Seq) -> None:
        """Prepares a sequence to leave: its `num_computed` falls to what planned steps compute, and the follower that
        shares most with it computes the rest in its place.
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


def pair_arrivals(group: list[Seq], block_size: int) -> list[Arrival]:
    """Pairs each sequence of `group` with a sibling whose blocks it can share: a holder of blocks, or one before it."""
    request = group[0].request
    holders = sorted((s for s in request.sequences if s.state in HOLDING), key=key)
    arrivals = []
    for sequence in group:
        arrival = Arrival(sequence)
        if holders and request.search is None:
            # Each sequence computes the last prompt position itself.
            arrival = Arrival(sequence, holders[0], (len(request.command.prompt_ids) - 1) // block_size)
        else:
            # Beams share the blocks of their common beginning.
            for holder in holders:
                shared = _common_tokens(sequence, holder) // block_size
                if shared > arrival.shared:
                    arrival = Arrival(sequence, holder, shared)
        arrivals.append(arrival)
        holders.append(sequence)
    return arrivals


def _common_tokens(one: Seq, other: Seq) -> int:
    """Leading tokens that two sequences share, without the last, which each computes for itself."""
    length = min(one.num_tokens, other.num_tokens) - 1
    differs = np.array(one.token_ids[:length], np.uint32) != np.array(other.token_ids[:length], np.uint32)
    return int(differs.argmax()) if differs.any() else length
