import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.call_count import count_calls
from support.engine.arrays import ids

from pagekv.kvmanager.kvcache.eviction_policy import FreeQueue


def test_starts_in_order_and_allocates_at_the_head() -> None:
    """The order is that of joining; the head goes first."""
    queue = FreeQueue(4)
    assert list(queue) == [0, 1, 2, 3]
    assert queue.pop(2).tolist() == [0, 1]
    queue.append(ids([0]))
    assert list(queue) == [2, 3, 0]


def test_a_queue_beside_another_starts_empty_and_shares_its_positions() -> None:
    """A void entry of one queue must not count as valid because its block stands in the other: not even where one is
    the last of the first queue and the other is the first of the second.
    """
    first = FreeQueue(3)
    queue = FreeQueue(2, first)
    assert (len(queue), list(queue), queue.pop(0).tolist()) == (0, [], [])
    first.append(first.pop(2))
    assert first._tail == len(first._entries)
    first.remove(ids([1, 2]))
    queue.append(ids([1, 2]))
    assert (list(first), list(queue)) == ([0], [1, 2])
    assert (first.pop(1).tolist(), queue.pop(2).tolist()) == ([0], [1, 2])
    assert queue._position is first._position


def test_remove_from_the_middle() -> None:
    """Any block can leave, wherever it stands, without a search."""
    queue = FreeQueue(5)
    queue.remove(ids([2]))
    assert list(queue) == [0, 1, 3, 4]
    assert len(queue) == 4


def test_more_than_there_are_is_refused_and_nothing_is_taken() -> None:
    queue = FreeQueue(2)
    with pytest.raises(IndexError, match="3 blocks wanted, 2 are free"):
        queue.pop(3)
    assert list(queue) == [0, 1]


@given(st.data())
def test_agrees_with_plain_lists(data: st.DataObject) -> None:
    """Batches of every kind, in a queue and one beside it; joining often enough to fill the entries several times."""
    size = data.draw(st.integers(1, 6))
    capacity = data.draw(st.integers(0, size))
    first = FreeQueue(size)
    queues = (first, FreeQueue(capacity, first))
    models: tuple[list[int], list[int]] = (list(range(size)), [])
    for _ in range(data.draw(st.integers(0, 40))):
        which = data.draw(st.sampled_from([0, 0, 1]))
        queue, model = queues[which], models[which]
        move = data.draw(st.sampled_from(["pop", "append", "remove"]))
        outside = [block for block in range(size) if block not in models[0] + models[1]]
        if move == "pop":
            count = data.draw(st.integers(0, len(model)))
            assert queue.pop(count).tolist() == model[:count]
            del model[:count]
        elif move == "append":
            room = (capacity if which else size) - len(model)
            joining = data.draw(st.lists(st.sampled_from(outside), unique=True, max_size=room)) if outside else []
            queue.append(ids(joining))
            model += joining
        else:
            leaving = data.draw(st.lists(st.sampled_from(model), unique=True)) if model else []
            queue.remove(ids(leaving))
            model[:] = [block for block in model if block not in leaving]
        for queue, model in zip(queues, models, strict=True):
            assert list(queue) == model
            assert len(queue) == len(model)


def test_voids_longer_than_what_is_looked_at_together_are_skipped() -> None:
    """Hundreds of blocks left from the middle, one at a time and whole stretches, and the head passes over all of
    them, into the next blocks that are there.
    """
    chance = random.Random(3)
    for _ in range(20):
        queue, model = FreeQueue(400), list(range(400))
        begin = chance.randrange(200)
        leaving = {*range(begin, begin + 150), *chance.sample(range(400), 60)}
        queue.remove(ids(sorted(leaving)))
        model = [block for block in model if block not in leaving]
        while model:
            count = min(len(model), chance.choice([1, 3, 40, 100]))
            assert queue.pop(count).tolist() == model[:count]
            del model[:count]
            assert (list(queue), len(queue)) == (model, len(model))


def test_entries_that_are_void_are_skipped_in_few_looks() -> None:
    """A long prompt that is hit leaves as many of them in a row as it has blocks."""

    def calls(held: int) -> int:
        queue = FreeQueue(held + 10)
        queue.remove(ids([*range(held)]))
        made = count_calls(lambda: queue.pop(1))
        assert list(queue) == [*range(held + 1, held + 10)]
        return made

    assert calls(8000) < 2 * calls(1000)
