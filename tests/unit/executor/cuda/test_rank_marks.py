"""A rank whose device waits for another rank ends in time; one whose device comes to its mark does not."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from pagekv.executor.cuda.rank_marks import RankMarks
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World

TIMEOUT_S = 60.0


class Gate:
    """A mark that is reached when it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.opened.wait(TIMEOUT_S)


def test_only_a_wait_beyond_the_limit_ends_the_rank() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    shards = Shards(World(0, 2, 2), lost.put)
    gates = [Gate(), Gate(), Gate()]
    marks = RankMarks(iter([gate.wait for gate in gates]).__next__, shards)
    first, second, third = (marks() for _ in gates)
    # Without a limit, while ranks load, nothing is watched.
    gates[0].opened.set()
    first()
    shards.limit_s = 0.2
    gates[1].opened.set()
    second()
    waiting = threading.Thread(target=third)
    waiting.start()
    words = lost.get(timeout=TIMEOUT_S)
    assert words == "a rank lets this one wait in a step for 0.2 s (--rank-timeout-s)"
    gates[2].opened.set()
    waiting.join(TIMEOUT_S)
    assert lost.empty()


def test_a_wait_of_one_thread_does_not_hide_that_of_another() -> None:
    """The thread of the backend measures a step while the one that collects still waits for a step before."""
    lost: SimpleQueue[str] = SimpleQueue()
    shards = Shards(World(0, 2, 2), lost.put)
    shards.limit_s = 0.2
    stuck, passed = Gate(), Gate()
    passed.opened.set()
    marks = RankMarks(iter([stuck.wait, passed.wait]).__next__, shards)
    waiting = threading.Thread(target=marks())
    waiting.start()
    assert stuck.begun.wait(TIMEOUT_S)
    marks()()
    assert lost.get(timeout=TIMEOUT_S).startswith("a rank lets this one wait")
    stuck.opened.set()
    waiting.join(TIMEOUT_S)
