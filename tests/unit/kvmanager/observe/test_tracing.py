"""Spans as OpenTelemetry sees them: in memory, and as a collector receives them over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.clients.otlp_collector import collector
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.recovery import Fault
from pagekv.kvmanager.observe.tracing import Tracing, otlp_processor
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def traced(*commands: GenerateCommand, poison: bool = False) -> list[ReadableSpan]:
    """The spans of these requests, which run one after the other."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        if poison:
            bench.poison[tuple(PROMPT)] = Fault.STEP
        for each in commands:
            try:
                await read(engine.submit(each))
            except Exception:
                assert poison

    harness.run(body, observers=[tracing], step_attempts=1)
    return list(exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


def test_spans_have_the_time_of_a_clock_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, long after the start; within a request no span is moved."""
    later = time.time_ns() - time.monotonic_ns() + 86_400 * 10**9
    monkeypatch.setattr("time.time_ns", lambda: later + time.monotonic_ns())
    begun = time.time_ns()
    spans = traced(command("a", PROMPT), command("b", PROMPT))
    ended = time.time_ns()
    assert len(spans) >= 8
    assert all(begun <= (span.start_time or 0) <= (span.end_time or 0) <= ended for span in spans)


def test_a_request_is_a_span_with_what_it_did_below_it() -> None:
    spans = traced(command("a", PROMPT), command("b", PROMPT))
    first, second = (span for span in spans if span.name == "generate")
    assert dict(attributes(second)) == {
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "pagekv.request_id": "b",
        "pagekv.n": 1,
        "pagekv.end": "finished",
        "pagekv.cached_tokens": 8,
        "pagekv.preemptions": 0,
        "pagekv.time_to_first_token_s": attributes(second)["pagekv.time_to_first_token_s"],
    }
    assert second.kind is SpanKind.SERVER
    assert second.parent is None
    assert first.context.trace_id != second.context.trace_id
    below = [span for span in spans if span.parent is not None and span.parent.span_id == second.context.span_id]
    assert [(span.name, attributes(span).get("pagekv.tokens")) for span in below] == [
        ("queued", None),
        ("prefill chunk", 1),
        ("decode", 6),
    ]
    assert {span.context.trace_id for span in below} == {second.context.trace_id}
    times = [time for span in below for time in (span.start_time or 0, span.end_time or 0)]
    assert times == sorted(times)
    assert second.start_time == times[0]
    assert (second.end_time or 0) >= times[-1]
    assert second.resource.attributes["service.name"] == "pagekv-manager"


@pytest.mark.parametrize(("flags", "spans"), [("01", 4), ("00", 0)])
def test_its_parent_is_what_the_caller_named_and_decides_on_sampling(flags: str, spans: int) -> None:
    parent = f"00-{TRACE}-{SPAN}-{flags}"
    found = traced(GenerateCommand("a", PROMPT, SamplingParams(max_tokens=2), trace_parent=parent))
    assert len(found) == spans
    for span in found:
        assert f"{span.context.trace_id:032x}" == TRACE
    roots = [span for span in found if span.name == "generate"]
    assert [f"{span.parent.span_id:016x}" for span in roots if span.parent] == [SPAN] * len(roots)


@pytest.mark.parametrize("parent", ["nonsense", "00-0-0-01", f"00-{'0' * 32}-{SPAN}-01", "00-" + "é" * 40])
def test_a_parent_that_is_none_is_not_there(parent: str) -> None:
    found = traced(GenerateCommand("a", PROMPT, SamplingParams(max_tokens=2), trace_parent=parent))
    assert [span.parent for span in found if span.name == "generate"] == [None]


def test_a_request_that_failed_is_an_error() -> None:
    (root,) = (s for s in traced(command("a", PROMPT), poison=True) if s.name == "generate")
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["pagekv.end"] == "failed"


def test_a_collector_gets_the_spans_over_http() -> None:
    with collector() as server:
        tracing = Tracing(otlp_processor(f"{server.url}/v1/traces"))

        async def body(engine: EngineLoop, bench: Bench) -> None:
            await read(engine.submit(command("a", PROMPT)))

        harness.run(body, observers=[tracing])
        asyncio.run(tracing.close())
    assert {span.name for span in server.spans} == {"generate", "queued", "prefill chunk", "decode"}


def test_a_collector_that_is_not_there_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving goes on, and the end waits for a bounded time."""
    with collector() as gone:
        url = gone.url
    monkeypatch.setattr("pagekv.kvmanager.observe.tracing.FLUSH_S", 0.1)
    tracing = Tracing(otlp_processor(f"{url}/v1/traces"))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for name in "abc":
            assert await read(engine.submit(command(name, PROMPT))) == harness.expect(PROMPT)
        await tracing.close()

    harness.run(body, observers=[tracing])
