"""Frames, and the messages that lead from one to another."""

from __future__ import annotations

import numpy as np
import pytest
from support.browser.page_reader import PageReader
from support.engine.fake_engine import MODEL, FakeEngine

from pagekv.kvmanager.page import hub
from pagekv.kvmanager.page.hub import PoolFrame
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams


def frame(number: int, device: list[int], requests: dict[str, hub.Row], live: int) -> PoolFrame:
    states = np.array(device, np.uint8)
    fields = {"step": number, "requests": requests, "totals": {"live_requests": live}}
    return PoolFrame(number, 1, states, states[:1], 0, 0, fields)


def test_a_snapshot_and_a_delta_lead_to_the_later_frame() -> None:
    old = frame(1, [0, 1, 2, 9], {"a": {"state": "running"}, "b": {"state": "waiting"}}, 2)
    new = frame(2, [0, 1, 1, 9], {"a": {"state": "running"}, "c": {"state": "waiting"}}, 3)
    reader = PageReader()
    reader.take(hub.snapshot(old, MODEL, "boot"))
    assert (bytes(reader.device), reader.requests) == (old.device.tobytes(), old.fields["requests"])
    delta = hub.delta(old, new)
    assert "host" not in delta
    reader.take(delta)
    assert (bytes(reader.device), reader.requests) == (new.device.tobytes(), new.fields["requests"])
    assert reader.totals["live_requests"] == 3


def test_a_delta_leaves_out_what_is_the_same() -> None:
    old = frame(1, [0, 1], {}, 0)
    assert hub.delta(old, frame(2, [0, 1], {}, 0)) == {"type": "delta", "step": 2}


def test_more_requests_than_are_listed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_REQUESTS", 2)
    engine = FakeEngine()
    for number in range(5):
        engine.submit(GenerateCommand(f"r{number}", [1], SamplingParams()))
    rows, live = hub.request_rows(engine)
    assert (list(rows), live) == (["r0", "r1"], 5)
    assert rows["r0"]["state"] == "running"
