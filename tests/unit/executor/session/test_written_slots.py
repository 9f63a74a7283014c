"""Steps that read what the epoch has written are run, however it came to be written; `refused_steps` has the others."""

from __future__ import annotations

import pytest
from support.executor.executor_steps import World, memory_op, new_sequence

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.session.written_slots import WrittenSlots

COPY, OUT, IN = CopyDirection.COPY, CopyDirection.SWAP_OUT, CopyDirection.SWAP_IN
PROMPT = list(range(100, 110))


@pytest.fixture
def world() -> World:
    """Sequence 1 has computed the prompt, in blocks 5, 9 and 2 of four slots."""
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    return world


def test_counts_follow_the_tokens_of_a_sequence(world: World) -> None:
    written = world.epoch.written
    assert [written.of(block) for block in (5, 9, 2, 0)] == [4, 4, 2, 0]
    world.run()
    assert written.of(2) == 3
    # A block that begins anew has kept what was written behind: nothing of another epoch is there.
    world.run(finished_seqs=[1], new_seqs=[new_sequence(2, [7], [9])])
    assert written.of(9) == 4


def test_a_block_is_computed_for_others_at_once_and_after_its_sequence_has_gone(world: World) -> None:
    world.run(finished_seqs=[1], new_seqs=[new_sequence(2, PROMPT, [5, 9, 2], 9)])
    world.run(finished_seqs=[2])
    assert 3 in world.run(new_seqs=[new_sequence(3, PROMPT, [5, 9, 2], 9)]).sampled


def test_what_another_sequence_writes_in_the_same_step_is_computed() -> None:
    world = World()
    new = [new_sequence(2, PROMPT, [5, 9, 7], 8), new_sequence(1, PROMPT[:8], [5, 9])]
    report = world.run(new_seqs=new, scheduled_seqs=[1, 2], scheduled_tokens=[8, 2])
    assert report.sampled.keys() == {1, 2}


def test_one_that_sits_out_may_call_computed_what_another_writes_in_its_last_block(world: World) -> None:
    tokens = list(world.epoch.live[1].token_ids)
    world.run(new_seqs=[new_sequence(2, [*tokens, 1], [5, 9, 2], 11)], scheduled_seqs=[2], scheduled_tokens=[0])
    assert world.epoch.written.of(2) == 3


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "ops",
    [
        [memory_op(COPY, [5, 9, 2], [20, 21, 22])],
        [memory_op(OUT, [5, 9, 2], [3, 4, 5]), memory_op(IN, [3, 4, 5], [20, 21, 22])],
    ],
)
def test_copies_take_the_counts_of_their_sources_along(world: World, ops: list[BlockCopies], together: bool) -> None:
    """In the step of the copies as in later ones."""
    reader = new_sequence(2, PROMPT, [20, 21, 22], 9)
    if together:
        world.run(memory_ops=ops, new_seqs=[reader], finished_seqs=[1])
    else:
        world.run(memory_ops=ops[:1], finished_seqs=[1])
        world.run(memory_ops=ops[1:])
        world.run(new_seqs=[reader])
    assert [world.epoch.written.of(block) for block in (20, 21, 22)] == [4, 4, 2]
    with pytest.raises(InvalidRequest, match=r"3 slots of block 22, of which 2 were written \(R37\)"):
        world.run(finished_seqs=[2], new_seqs=[new_sequence(3, [*PROMPT, 1, 2], [20, 21, 22], 11)])


def test_all_pairs_of_a_copy_read_what_was_there_before_it() -> None:
    written = WrittenSlots(4, 2)
    written.write({0: 3})
    copied = written.copied()
    assert copied.add(memory_op(OUT, [0], [1])) == -1
    assert copied.add(memory_op(IN, [1, 0], [2, 3])) == 1
    assert written.of(2) == 0
    copied.apply()
    assert (written.of(2), written.of(3)) == (3, 0)


def test_blocks_are_full_up_to_the_largest_size() -> None:
    written = WrittenSlots(3, 0)
    written.write({0: 256, 1: 255})
    assert written.are_full([], 256)
    assert written.are_full([0], 256)
    assert not written.are_full([0, 1], 256)
    written.write({1: 256, 0: 1})
    assert written.are_full([0, 1], 256)


def test_nothing_of_the_epoch_before_is_written() -> None:
    """As a rival manager would go on with the text of the one before it."""
    old, new = World(), World()
    old.enter(1, PROMPT, [5, 9, 2])
    new.backend = old.backend
    new.epoch.backend = old.backend
    for columns in (
        {"new_seqs": [new_sequence(1, PROMPT, [5, 9, 2], 9)]},
        {"memory_ops": [memory_op(COPY, [5], [6])]},
        {"memory_ops": [memory_op(OUT, [5], [0])]},
        {"memory_ops": [memory_op(IN, [0], [6])]},
    ):
        with pytest.raises(InvalidRequest, match=r"\(R3[67]\)$"):
            new.run(**columns)
