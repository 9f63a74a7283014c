"""Spans of requests, held against what the engine was made to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import RequestEnd
from pagekv.kvmanager.observe.tracing import MAX_SPANS, Span, TracedRequest, Tracing
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

PROMPT = list(range(1, 31))
LIMITS = SchedulerLimits(max_batch_tokens=12, max_running=32, watermark=0.0, prefix_cache=True)

Body = Callable[[EngineLoop, Bench], Awaitable[None]]


def run(body: Body, **changes: object) -> dict[str, TracedRequest]:
    """The traces that were handed on, by request id."""
    traces: list[TracedRequest] = []
    ticks = count()
    observer = Tracing(SpanProcessor(), clock=lambda: next(ticks))
    vars(observer)["emit"] = traces.append
    harness.run(body, observers=[observer], **changes)
    assert (observer._traces, observer._progress, observer._prefilling) == ({}, {}, {})
    for trace in traces:
        for span in trace.spans:
            assert trace.start <= span.start <= span.end <= trace.end
    assert len({trace.request.command.request_id for trace in traces}) == len(traces)
    return {trace.request.command.request_id: trace for trace in traces}


def names(trace: TracedRequest, sequence: int = 0) -> list[str]:
    """Names of a sequence's spans, in order."""
    return [span.name for span in sorted(spans(trace, sequence), key=lambda s: (s.start, s.end))]


def spans(trace: TracedRequest, sequence: int = 0, name: str = "") -> list[Span]:
    return [span for span in trace.spans if span.sequence == sequence and (not name or span.name == name)]


def test_a_prompt_in_chunks_and_its_decode() -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT, max_tokens=5)))
        await read(engine.submit(command("again", PROMPT, max_tokens=1)))

    traces = run(body, limits=LIMITS)
    trace = traces["a"]
    assert names(trace) == ["queued", "prefill chunk", "prefill chunk", "prefill chunk", "decode"]
    assert [span.tokens for span in spans(trace, name="prefill chunk")] == [12, 12, 6]
    (decode,) = spans(trace, name="decode")
    assert decode.tokens == 5
    assert trace.first_token == decode.start
    assert (trace.how, trace.finish_reasons) == (RequestEnd.FINISHED, ["length"])
    # Steps run one after the other, though they are planned ahead.
    chunks = spans(trace, name="prefill chunk")
    assert all(a.end <= b.start for a, b in pairwise(chunks))
    (chunk,) = spans(traces["again"], name="prefill chunk")
    assert chunk.tokens == len(PROMPT) - 29
    assert names(traces["again"]) == ["queued", "prefill chunk", "decode"]


def test_a_chunk_of_one_token_is_a_chunk() -> None:
    """The executor is not told of it as a chunk: one token is what a sequence computes if nothing is said."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT[:25], max_tokens=2)))

    (trace,) = run(body, limits=LIMITS).values()
    assert [span.tokens for span in spans(trace, name="prefill chunk")] == [12, 12, 1]


@pytest.mark.parametrize(("mode", "name"), [("swap", "swapped"), ("recompute", "preempted")])
def test_preemptions_are_named_by_what_became_of_the_blocks(mode: str, name: str) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.description = harness.described(device_kv_bytes=20, host_kv_bytes=100)
        assert bench.link is not None
        bench.link.lose()
        await harness.until(lambda: len(bench.attaches) == 2)
        await harness.until(lambda: engine.statistics.stats().executor_attached)
        await asyncio.gather(*(read(engine.submit(command(f"r{i}", [i] * 9, max_tokens=30))) for i in range(4)))
        counted.append(engine.statistics.stats().preemptions_total)

    counted: list[int] = []
    traces = run(body, limits=replace(LIMITS, max_batch_tokens=64, swap=SwapPolicy(mode)))
    preempted = [trace for trace in traces.values() if name in names(trace)]
    assert sum(names(trace).count(name) for trace in preempted) == counted[0] > 0
    for trace in preempted:
        away = names(trace).count(name)
        # A token that was in flight comes when its sequence has left.
        assert 30 - away <= sum(span.tokens for span in spans(trace, name="decode")) <= 30
        at = names(trace).index(name)
        assert names(trace)[at - 1] == "decode"
        assert names(trace)[at + 1] == "prefill chunk"


def test_preempted_before_their_prompts_are_computed() -> None:
    """One of two has the number that a request before them had at the executor."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("before", PROMPT[:4], max_tokens=1)))
        streams = [engine.submit(command(name, [token, *PROMPT], max_tokens=2)) for name, token in (("a", 8), ("b", 9))]
        while len(engine._state.serving().running) < 2:  # noqa: ASYNC110  # both may be over a millisecond later
            await asyncio.sleep(0)
        engine._state.serving().preempt_all()
        await asyncio.gather(*map(read, streams))

    traces = run(body, limits=replace(LIMITS, max_batch_tokens=16))
    for name in "ab":
        phases = names(traces[name])
        assert phases.count("preempted") == 1
        assert phases[-2:] == ["prefill chunk", "decode"]


def test_a_lost_executor_is_a_wait() -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.001
        reading = asyncio.create_task(read(engine.submit(command("a", PROMPT, max_tokens=40))))
        await harness.until(lambda: engine.statistics.stats().generated_tokens_total > 5)
        assert bench.link is not None
        bench.link.lose()
        await reading

    (trace,) = run(body, limits=LIMITS).values()
    assert names(trace).count("executor lost") == 1
    at = names(trace).index("executor lost")
    assert names(trace)[at + 1 :][0] == "prefill chunk"
    assert names(trace)[-1] == "decode"


def test_every_sequence_of_a_request_has_its_spans() -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("three", PROMPT, max_tokens=6, n=3)))
        searching = SamplingParams(max_tokens=4, beam_width=3)
        await read(engine.submit(GenerateCommand("beams", PROMPT, searching, 2)))

    traces = run(body, limits=replace(LIMITS, max_batch_tokens=64))
    for index in range(3):
        assert names(traces["three"], index) == ["queued", "prefill chunk", "decode"]
    assert traces["three"].finish_reasons == ["length"] * 3
    assert names(traces["beams"]) == ["queued", "beam search"]
    assert traces["beams"].finish_reasons == ["length"] * 2


def test_aborted_in_every_state() -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.001
        running = engine.submit(command("running", PROMPT, max_tokens=100))
        await harness.until(lambda: engine.statistics.stats().generated_tokens_total > 5)
        engine.submit(command("queued", PROMPT))
        engine.abort("queued")
        stopped = engine.submit(command("stopped", PROMPT, max_tokens=100))
        await stopped.take()
        engine.finish_sequence(stopped, 0)
        engine.abort("running")
        await read(running)

    traces = run(body)
    assert (names(traces["queued"]), traces["queued"].how) == (["queued"], RequestEnd.ABORTED)
    assert (names(traces["running"])[-1], traces["running"].how) == ("decode", RequestEnd.ABORTED)
    assert (names(traces["stopped"])[-1], traces["stopped"].how) == ("decode", RequestEnd.FINISHED)


def test_a_trace_is_bounded() -> None:
    trace = TracedRequest(None, "m", 0)  # type: ignore[arg-type]  # whose it is does not matter
    for index in range(MAX_SPANS + 3):
        trace.add(Span("prefill chunk", index, index, 0))
    assert (len(trace.spans), trace.dropped) == (MAX_SPANS, 3)
