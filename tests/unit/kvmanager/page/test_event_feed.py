"""The page's events: recorded in order while somebody looks, and only the last ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, expect, read, until

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import BlockMap
from pagekv.kvmanager.page.event_feed import KEPT, EventFeed


def test_events_of_requests_come_in_order() -> None:
    feed = EventFeed(lambda: 5.0)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("unseen", [1])))
        assert feed.total == 0
        feed.recording = True
        prompt = list(range(20))
        assert await read(engine.submit(command("one", prompt))) == expect(prompt)
        assert [(event["n"], event["at"], event["kind"]) for event in feed.since(0)] == [
            (1, 5.0, "admitted"),
            (2, 5.0, "finished"),
        ]
        admitted, finished = feed.since(0)
        assert (admitted["request"], admitted["tokens"], admitted["computed"]) == ("one", 20, 0)
        assert (finished["request"], finished["tokens"]) == ("one", 6)
        engine.submit(command("left", [1], 40))
        engine.abort("left")
        assert bench.link is not None
        bench.link.lose()
        await until(lambda: len(bench.attaches) == 2)
        assert [event["kind"] for event in feed.since(2)] == ["aborted", "detached", "attached"]

    engine_harness.run(body, [feed])


def test_a_new_viewer_gets_the_last_events() -> None:
    feed = EventFeed()
    feed.recording = True
    for number in range(KEPT + 5):
        feed.note("stored", blocks=number)
    assert [event["blocks"] for event in feed.since(0)] == list(range(5, KEPT + 5))
    assert [event["n"] for event in feed.since(KEPT + 4)] == [KEPT + 5]


NOBODY = np.zeros(4, np.int32)


class Looking:
    """A feed, and the events of one look."""

    def __init__(self) -> None:
        self.feed = EventFeed()
        self.feed.recording = True

    def at(self, published: list[bool], evictions: int, epoch: int = 1) -> list[tuple[str, dict[str, Any]]]:
        before = self.feed.total
        self.feed.look(BlockMap(epoch, 0, NOBODY, NOBODY, np.array(published), evictions, NOBODY, NOBODY))
        return [
            (event["kind"], {name: event[name] for name in ("blocks", "block") if name in event})
            for event in self.feed.since(before)
        ]


def test_stored_evicted_and_cleared_blocks_are_counted() -> None:
    looking = Looking()
    assert looking.at([True, False, False, False], 0) == []
    assert looking.at([True, False, True, True], 0) == [("stored", {"blocks": 2, "block": 2})]
    # Block 0 was evicted and filled again, block 2 was evicted.
    assert looking.at([True, False, False, True], 2) == [
        ("evicted", {"blocks": 2}),
        ("stored", {"blocks": 1, "block": None}),
    ]
    assert looking.at([False, True, False, False], 2) == [
        ("cleared", {"blocks": 2}),
        ("stored", {"blocks": 1, "block": 1}),
    ]
    assert looking.at([False, True, False, False], 2) == []


def test_looks_at_different_pools_and_around_a_pause_are_not_compared() -> None:
    looking = Looking()
    looking.at([True] * 4, 0)
    assert looking.at([False] * 4, 0, epoch=2) == []
    looking.feed.pause()
    looking.feed.recording = True
    assert looking.at([True] * 4, 0, epoch=2) == []
