"""The types that every backend gets and returns."""

from __future__ import annotations

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState


def test_the_share_of_a_step_samples_when_it_ends_with_the_last_token() -> None:
    state = SequenceState(1, [5, 6, 7], 3, [0], 0, Sampling())
    assert [Scheduled(state, start, count).samples for start, count in ((0, 2), (0, 3), (2, 1))] == [False, True, True]
