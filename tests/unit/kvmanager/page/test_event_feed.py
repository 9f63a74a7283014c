"""The page's events: recorded in order while somebody looks, and only the last ones."""

from __future__ import annotations

import pytest
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, expect, read, until

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.page.event_feed import KEPT, EventFeed


def test_events_of_requests_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
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

    engine_harness.run(monkeypatch, body, [feed])


def test_a_new_viewer_gets_the_last_events() -> None:
    feed = EventFeed()
    feed.recording = True
    for number in range(KEPT + 5):
        feed.note("stored", blocks=number)
    assert [event["blocks"] for event in feed.since(0)] == list(range(5, KEPT + 5))
    assert [event["n"] for event in feed.since(KEPT + 4)] == [KEPT + 5]
