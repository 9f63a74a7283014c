"""Digests of ranks that did the same are equal, and any difference in tables or tokens shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.executor.executor_steps import new_sequence

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampled, SequenceState
from pagekv.executor.session.state_digest import WHOLE_EVERY, StateDigest
from pagekv.executor.session.step import Step


def copies(source: int = 1, direction: CopyDirection = CopyDirection.COPY) -> BlockCopies:
    return BlockCopies(direction, [source], [2])


def digest_of(step: Step, live: dict[int, SequenceState], token: int = 7) -> bytes:
    digest = StateDigest()
    return digest.collected(digest.launched(step, live), {1: Sampled(token)}, [])


STEPS: list[Callable[[], Step]] = [
    lambda: Step(9, 1),
    lambda: Step(9, 2),
    lambda: Step(9, 1, finished_seqs=[1]),
    lambda: Step(9, 1, append_seqs=[1], append_blocks=[2]),
    lambda: Step(9, 1, append_seqs=[1], append_blocks=[3]),
    lambda: Step(9, 1, scheduled_seqs=[1], scheduled_tokens=[2]),
    lambda: Step(9, 1, memory_ops=[copies()]),
    lambda: Step(9, 1, memory_ops=[copies(4)]),
    lambda: Step(9, 1, memory_ops=[copies(direction=CopyDirection.SWAP_IN)]),
    lambda: Step(9, 1, new_seqs=[new_sequence(1, [1, 2, 3], [1])]),
    lambda: Step(9, 1, new_seqs=[new_sequence(1, [1, 2, 4], [1])]),
    lambda: Step(9, 1, new_seqs=[new_sequence(1, [1, 2, 3], [2])]),
]


def test_equal_steps_have_equal_digests_and_others_have_others() -> None:
    found = [digest_of(step(), {}) for step in STEPS]
    assert found == [digest_of(step(), {}) for step in STEPS]
    assert len(set(found)) == len(found)


def test_tokens_are_part_of_it_in_every_later_step() -> None:
    assert digest_of(Step(9, 1), {}, 7) != digest_of(Step(9, 1), {}, 8)
    ours, theirs = StateDigest(), StateDigest()
    for step, (mine, other) in enumerate([(7, 8), (3, 3)], 1):
        launched = ours.launched(Step(9, step), {}), theirs.launched(Step(9, step), {})
        assert launched[0] == launched[1], "tokens are chained apart"
        assert ours.collected(launched[0], {1: Sampled(mine)}, []) != theirs.collected(
            launched[1], {1: Sampled(other)}, []
        )


def test_a_rank_may_collect_a_step_before_or_after_it_launches_the_next() -> None:
    first, second = StateDigest(), StateDigest()
    one = first.launched(Step(9, 1), {})
    two = first.launched(Step(9, 2), {})
    found = [first.collected(one, {1: Sampled(4)}, []), first.collected(two, {}, [1])]
    one = second.launched(Step(9, 1), {})
    other = [second.collected(one, {1: Sampled(4)}, [])]
    other.append(second.collected(second.launched(Step(9, 2), {}), {}, [1]))
    assert found == other


@pytest.mark.parametrize("seq_id", [0, 1, 63, 64, 1000])
def test_a_table_that_drifted_shows_once_in_so_many_steps(seq_id: int) -> None:
    """However many other sequences come and go."""
    right, wrong = new_sequence(seq_id, [1, 2, 3], [1, 5]), new_sequence(seq_id, [1, 2, 3], [1, 6])
    shown = []
    for step in range(1, 3 * WHOLE_EVERY + 1):
        others = {other: new_sequence(other, [4], [other]) for other in range(2000, 2000 + step % 7)}
        ours, theirs = ({**others, seq_id: own} for own in (right, wrong))
        if digest_of(Step(9, step), ours) != digest_of(Step(9, step), theirs):
            shown.append(step)
    assert len(shown) == 3
    assert {step % WHOLE_EVERY for step in shown} == {seq_id % WHOLE_EVERY}


def test_each_step_has_its_share_of_the_tables() -> None:
    """One in so many of the sequences of a step, never all of them at once."""
    right = {seq_id: new_sequence(seq_id, [1], [seq_id]) for seq_id in range(2 * WHOLE_EVERY)}
    for step in (1, WHOLE_EVERY - 1, WHOLE_EVERY):
        drifted = [
            seq_id
            for seq_id in right
            if digest_of(Step(9, step), right)
            != digest_of(Step(9, step), {**right, seq_id: new_sequence(seq_id, [1], [seq_id + 1])})
        ]
        assert drifted == [step % WHOLE_EVERY, step % WHOLE_EVERY + WHOLE_EVERY]
