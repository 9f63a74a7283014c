"""Queues over one column of positions, against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.arrays import ids

from pagekv.kvmanager.kvcache.growing_queue import GrowingQueue

NUM_BLOCKS = 80


@given(st.data())
def test_queues_agree_with_plain_lists(data: st.DataObject) -> None:
    position = np.full(NUM_BLOCKS, -1, np.int64)
    queues = [GrowingQueue(position, number) for number in range(3)]
    plain: list[list[int]] = [[], [], []]
    for _ in range(data.draw(st.integers(0, 40))):
        at = data.draw(st.integers(0, 2))
        move = data.draw(st.sampled_from(["append", "append", "remove", "pop"]))
        if move == "append":
            out = [block for block in range(NUM_BLOCKS) if not any(block in queue for queue in plain)]
            data.draw(st.randoms(use_true_random=False)).shuffle(out)
            blocks = out[: data.draw(st.integers(0, len(out)))]
            queues[at].append(ids(blocks))
            plain[at] += blocks
        elif move == "remove":
            blocks = data.draw(st.lists(st.sampled_from(plain[at]), unique=True)) if plain[at] else []
            queues[at].remove(ids(blocks))
            plain[at] = [block for block in plain[at] if block not in blocks]
        else:
            count = data.draw(st.integers(0, len(plain[at])))
            assert queues[at].pop(count).tolist() == plain[at][:count]
            del plain[at][:count]
        for queue, wanted in zip(queues, plain, strict=True):
            assert (list(queue), len(queue)) == (wanted, len(wanted))
            assert queue.ordered(ids(wanted[::-1])).tolist() == wanted
            assert len(queue._entries) <= max(16, 4 * len(queue))


def test_a_queue_gives_its_memory_back() -> None:
    position = np.full(10_000, -1, np.int64)
    queue = GrowingQueue(position, 5)
    queue.append(np.arange(10_000, dtype=np.int32))
    assert queue.pop(9_999).tolist() == [*range(9_999)]
    assert list(queue) == [9_999]
    assert queue._entries.nbytes < 100
