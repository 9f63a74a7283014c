import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagekv.kvmanager.free_queue import FreeQueue


def test_starts_in_order_and_allocates_at_the_head() -> None:
    queue = FreeQueue(4)
    assert list(queue) == [0, 1, 2, 3]
    assert [queue.pop_head(), queue.pop_head()] == [0, 1]
    queue.append(0)
    assert list(queue) == [2, 3, 0]


def test_remove_from_the_middle() -> None:
    queue = FreeQueue(5)
    queue.remove(2)
    assert list(queue) == [0, 1, 3, 4]
    assert 2 not in queue
    assert len(queue) == 4


def test_refuses_what_would_break_the_links() -> None:
    queue = FreeQueue(2)
    with pytest.raises(ValueError, match="already"):
        queue.append(1)
    queue.remove(1)
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(1)
    queue.remove(0)
    with pytest.raises(IndexError, match="empty"):
        queue.pop_head()


@given(st.lists(st.tuples(st.sampled_from(["pop", "append", "remove"]), st.integers(0, 7)), max_size=60))
def test_agrees_with_a_plain_list(moves: list[tuple[str, int]]) -> None:
    queue, model = FreeQueue(8), list(range(8))
    for move, block in moves:
        if move == "pop" and model:
            assert queue.pop_head() == model.pop(0)
        elif move == "append" and block not in model:
            queue.append(block)
            model.append(block)
        elif move == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        assert list(queue) == model
        assert len(queue) == len(model)
