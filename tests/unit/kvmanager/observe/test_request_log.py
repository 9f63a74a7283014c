"""Lines about requests at level debug."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read
from support.engine.running_manager import Running, config, run

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe import request_log
from pagekv.kvmanager.observe.request_log import RequestLog

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_request_is_told_from_the_queue_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, request_log.__name__)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for name in ("a", "b"):
            await read(engine.submit(command(name, PROMPT, max_tokens=3)))

    harness.run(body, observers=[RequestLog()])
    told: list[tuple[str, dict[str, Any]]] = [(each.getMessage(), vars(each)["fields"]) for each in caplog.records]
    assert told[:3] == [
        ("request queued", {"request": "a", "tenant": "", "prompt_tokens": 9, "sequences": 1}),
        (
            "sequence computed from here",
            {"request": "a", "sequence": 0, "known_tokens": 9, "computed_tokens": 0, "preemptions": 0},
        ),
        ("request ended", {"request": "a", "how": "finished", "output_tokens": 3, "preemptions": 0}),
    ]
    # The second hits the blocks of the first.
    assert told[4][1]["request"] == "b"
    assert told[4][1]["computed_tokens"] > 0
    assert len(told) == 6


@pytest.mark.parametrize("level", ["debug", "info"])
def test_requests_and_refused_calls_are_told_at_level_debug_alone(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level.upper())

    async def body(running: Running) -> None:
        await running.refusal()
        observers = running.manager.engine.observers._all
        assert any(isinstance(each, RequestLog) for each in observers) == (level == "debug")

    run(config(tmp_path, "--log-level", level), body)
    told = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "a call was refused"]
    refused = {"method": "/pagekv.v1.InferenceService/Generate", "error": "Unavailable", "field": ""}
    assert told == ([refused] if level == "debug" else [])
