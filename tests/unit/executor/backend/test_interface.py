"""The types that every backend gets and returns."""

from __future__ import annotations

from pagekv.executor.backend.interface import Sampled, Sampling, Scheduled, SequenceState, SynchronousBackend


def test_the_share_of_a_step_samples_when_it_ends_with_the_last_token() -> None:
    state = SequenceState(1, [5, 6, 7], 3, [0], 0, Sampling())
    assert [Scheduled(state, start, count).samples for start, count in ((0, 2), (0, 3), (2, 1))] == [False, True, True]


def test_a_backend_that_computes_at_once_is_ready_when_launched() -> None:
    class Constant(SynchronousBackend):
        def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
            return {item.state.seq_id: Sampled(9) for item in scheduled}

    backend = Constant()
    launch = backend.launch([Scheduled(SequenceState(4, [1], 1, [0], 0, Sampling()), 0, 1)])
    assert launch.ready
    assert launch.collect() == {4: Sampled(9)}
    assert not backend.is_lost(RuntimeError())
