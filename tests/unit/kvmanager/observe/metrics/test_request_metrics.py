"""Times and sizes of requests, by a clock that ticks whenever it is read."""

from __future__ import annotations

from itertools import count

import pytest
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_latencies_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode have histograms of their own."""
    ticks = count()
    requests = RequestMetrics(clock=lambda: float(next(ticks)))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT, max_tokens=4)))

    harness.run(monkeypatch, body, observers=[requests])
    # Read when the request is queued (0), planned (1), at four commits (2 to 5), and at the end (6).
    assert requests.queue_time.total == 1
    assert requests.time_to_first_token.total == 2
    assert requests.prefill_time.total == 1
    assert requests.inter_token_latency.count == requests.inter_token_latency.total == 3
    assert requests.decode_time.total == 4
    assert requests.e2e_latency.total == 6


def test_sizes_and_ends_are_counted_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = RequestMetrics()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT, max_tokens=4, n=2)))

    harness.run(monkeypatch, body, observers=[requests])
    assert (requests.prompt_tokens.count, requests.prompt_tokens.total) == (1, 9)
    assert (requests.generation_tokens.count, requests.generation_tokens.total) == (2, 8)
    assert requests.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert requests.step_seconds.count == requests.step_tokens.count >= 4
    assert requests._live == {}
