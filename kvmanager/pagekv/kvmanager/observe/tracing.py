"""Requests as OpenTelemetry spans: the phases of a request (queued, prefill chunks, decode, preempted, swapped out) and
their times. A thread of its own sends them to a collector over OTLP/HTTP.

Spans are made when their request has ended. Their queue is bounded and nothing waits for it, so spans that the
collector does not accept in time are dropped. Spans hold counts, times and the request's id, but no text and no tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import Committed, NewSeq, StepPlan, StepResult

# Most spans of one request; further spans are counted and dropped.
MAX_SPANS = 256

# Seconds in which queued spans are still sent at the end.
FLUSH_S = 5.0
_ROOT = "generate"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_QUEUED, _PREFILL, _CHUNK, _DECODE, _SEARCH = "queued", "prefill", "prefill chunk", "decode", "beam search"
_PREEMPTED, _SWAPPED, _LOST, _OVER = "preempted", "swapped", "executor lost", ""


def since_1970_ns() -> int:
    """The difference between the time since 1970 and the monotonic clock, in nanoseconds. It changes when the system's
    clock is set or the machine is suspended.
    """
    return time.time_ns() - time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one sequence, from `start` to `end`, nanoseconds of the monotonic clock."""

    name: str
    start: int
    end: int
    # Index of the sequence within the request.
    sequence: int
    # Tokens computed by a prefill chunk, or sampled during a decode, the first one included; else 0.
    tokens: int = 0


@dataclass(slots=True)
class TracedRequest:
    """A request from `start` to `end`, nanoseconds of the monotonic clock. Adding `offset` gives the time since 1970; a
    request has one offset, so that its spans never go back in time.
    """

    request: LiveRequest
    model: str
    start: int
    end: int = 0
    offset: int = 0
    how: RequestEnd = RequestEnd.FINISHED
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    # In the order in which sequences ended. Ends by a stop string are left out, because no step reports them.
    finish_reasons: list[str] = field(default_factory=list)
    first_token: int = 0

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1


@dataclass(slots=True, eq=False)
class _Progress:
    """The present phase of one sequence; a beam search has one phase for all of its beams."""

    trace: TracedRequest
    index: int
    # Name of the current span, and when it began.
    doing: str
    since: int
    # The sequence's number at the executor, and the tokens that it had when it entered there.
    seq_id: int = NO_SEQ_ID
    had: int = 0
    # Known tokens that are not planned yet since the sequence entered the executor, and how often it has entered.
    left: int = 0
    stays: int = 0

    def turn(self, doing: str, now: int, tokens: int = 0) -> None:
        """Ends the current span and begins another. A prefill has no span of its own; its chunks have."""
        if self.doing not in (_PREFILL, _OVER):
            self.trace.add(Span(self.doing, self.since, now, self.index, tokens))
        self.doing, self.since = doing, now


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a prompt in a step that is planned."""

    progress: _Progress
    stay: int
    planned: int
    tokens: int
    # Whether it is the last chunk, so that its step samples a token.
    is_last: bool


def otlp_processor(endpoint: str) -> SpanProcessor:
    """A processor that sends spans to this URL in batches. OTEL_BSP_* variables set sizes and delays."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


class Tracing(Observer):
    """Records the phases of requests, and makes their spans when they end. The caller's trace and OTEL_TRACES_SAMPLER
    decide which requests are sampled.
    """

    def __init__(self, processor: SpanProcessor, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`processor` gets every span. `clock` gives nanoseconds."""
        name = os.environ.get("OTEL_SERVICE_NAME", "pagekv-manager")
        # Reads OpenTelemetry's variables for sampling and ids.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._processor = processor
        self._scope = InstrumentationScope("pagekv.kvmanager")
        self._clock = clock
        self._model = ""
        self._traces: dict[LiveRequest, TracedRequest] = {}
        self._progress: dict[LiveRequest, dict[int, _Progress]] = {}
        # By seq_id: sequences with prompt left to plan.
        self._prefilling: dict[int, _Progress] = {}
        # One list for each step in flight.
        self._chunks: deque[list[_Chunk]] = deque()
        self._latest_commit = 0

    def attached(self, model: EngineInfo, epoch: int) -> None:
        self._model = model.model_id or model.backend

    def submitted(self, request: LiveRequest) -> None:
        now = self._clock()
        trace = self._traces[request] = TracedRequest(request, self._model, now, offset=since_1970_ns())
        count = 1 if request.command.sampling.beam_width else request.command.n
        self._progress[request] = {index: _Progress(trace, index, _QUEUED, now) for index in range(count)}

    def planned(self, plan: StepPlan) -> None:
        chunks: list[_Chunk] = []
        self._chunks.append(chunks)
        if not (plan.new or plan.preempted or self._prefilling):
            return
        now = self._clock()
        for sequence, swapped in plan.preempted:
            self._end_phase(sequence, _SWAPPED if swapped else _PREEMPTED, now)
        for new in plan.new:
            self._enter(new, now)
        if self._prefilling:
            self._cut(plan, chunks, now)

    def _enter(self, new: NewSeq, now: int) -> None:
        progress = self._of(new.sequence)
        if progress is None or progress.doing == _SEARCH:
            return
        if new.sequence.request.search is not None:
            progress.turn(_SEARCH, now)
            return
        progress.turn(_PREFILL, now)
        progress.left = len(new.token_ids) - new.computed_tokens
        progress.seq_id, progress.had = new.seq_id, len(new.token_ids)
        progress.stays += 1
        self._prefilling[new.seq_id] = progress

    def _cut(self, plan: StepPlan, chunks: list[_Chunk], now: int) -> None:
        """Records the prompt chunks that the step computes."""
        tokens_of = dict(zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True))
        for seq_id, progress in list(self._prefilling.items()):
            tokens = tokens_of.get(seq_id, 1)
            progress.left -= tokens
            if tokens:
                chunks.append(_Chunk(progress, progress.stays, now, tokens, progress.left <= 0))
            if progress.left <= 0:
                del self._prefilling[seq_id]

    def committed(self, plan: StepPlan, result: StepResult, committed: Committed) -> None:
        chunks = self._chunks.popleft() if self._chunks else []
        before, now = self._latest_commit, self._clock()
        self._latest_commit = now
        for chunk in chunks:
            progress = chunk.progress
            # Steps run one after the other, so a step begins at the earliest when the one before it is done.
            progress.trace.add(Span(_CHUNK, max(chunk.planned, before), now, progress.index, chunk.tokens))
            if chunk.is_last and chunk.stay == progress.stays and progress.doing == _PREFILL:
                progress.turn(_DECODE, now)
                progress.trace.first_token = progress.trace.first_token or now
        for position, ending in committed.endings.items():
            sequence = committed.sequences[position]
            self._end_phase(sequence, _OVER, now)
            trace = self._traces.get(sequence.request)
            if trace is not None:
                trace.finish_reasons.append(ending.reason.value)
        for request in committed.searched:
            if request.search is not None and request in self._traces:
                self._traces[request].finish_reasons += [r.finish.value for r in request.search.results()]

    def detached(self) -> None:
        now = self._clock()
        self._chunks.clear()
        self._prefilling.clear()
        for sequences in self._progress.values():
            for progress in sequences.values():
                if progress.doing in (_PREFILL, _DECODE, _SEARCH):
                    progress.turn(_LOST, now)

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        trace = self._traces.pop(request, None)
        if trace is None:
            return
        trace.end, trace.how = self._clock(), end
        for sequence in request.sequences:
            self._end_phase(sequence, _OVER, trace.end)
        for progress in self._progress.pop(request).values():
            progress.turn(_OVER, trace.end)
        self.emit(trace)

    def _of(self, sequence: Seq) -> _Progress | None:
        of_request = self._progress.get(sequence.request, {})
        return of_request.get(0 if sequence.request.search is not None else sequence.index)

    def _end_phase(self, sequence: Seq, doing: str, now: int) -> None:
        """Begins the phase `doing` of a sequence that leaves the executor; its counts must be up to date."""
        progress = self._of(sequence)
        if progress is None or progress.doing in (doing, _OVER):
            return
        if self._prefilling.get(progress.seq_id) is progress:
            del self._prefilling[progress.seq_id]
        decoded = sequence.num_tokens - progress.had if progress.doing == _DECODE else 0
        progress.turn(doing, now, decoded)

    def emit(self, trace: TracedRequest) -> None:
        """Sends the spans of a request that has ended, as children of the span that its caller named. Spans are built
        at once, because a tracer that starts and ends them costs eight times as much.
        """
        context, command = Context(), trace.request.command
        if command.trace_parent:
            context = TraceContextTextMapPropagator().extract({"traceparent": command.trace_parent}, context)
        caller = get_current_span(context).get_span_context()
        trace_id = caller.trace_id if caller.is_valid else self._provider.id_generator.generate_trace_id()
        decision = self._provider.sampler.should_sample(context, trace_id, _ROOT, SpanKind.SERVER).decision
        if decision is not Decision.RECORD_AND_SAMPLE:
            return
        made = partial(ReadableSpan, resource=self._provider.resource, instrumentation_scope=self._scope)
        root, offset = self._span_context(trace_id), trace.offset
        for span in trace.spans:
            attributes = {"pagekv.sequence": span.sequence}
            if span.tokens:
                attributes["pagekv.tokens"] = span.tokens
            below = self._span_context(trace_id)
            start, end = offset + span.start, offset + span.end
            child = made(span.name, below, root, attributes=attributes, start_time=start, end_time=end)
            self._processor.on_end(child)
        self._processor.on_end(
            made(
                _ROOT,
                root,
                caller if caller.is_valid else None,
                attributes=_attributes(trace),
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR if trace.how is RequestEnd.FAILED else StatusCode.UNSET),
                start_time=offset + trace.start,
                end_time=offset + trace.end,
            )
        )

    def _span_context(self, trace_id: int) -> SpanContext:
        return SpanContext(trace_id, self._provider.id_generator.generate_span_id(), False, _SAMPLED)

    async def close(self) -> None:
        """Sends the queued spans, for at most FLUSH_S seconds."""
        thread = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)


def _attributes(trace: TracedRequest) -> dict[str, str | int | float | tuple[str, ...]]:
    """Attributes of the root span, with names of OpenTelemetry's conventions for generative AI where they exist."""
    request, command = trace.request, trace.request.command
    sequences = request.sequences
    if request.search is None:
        output = sum(sequence.num_output - command.resumed_tokens for sequence in sequences)
    else:
        output = sum(len(result.token_ids) for result in request.search.results())
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.request.model": trace.model,
        "gen_ai.request.max_tokens": command.sampling.max_tokens,
        "gen_ai.usage.input_tokens": len(command.prompt_ids) - command.resumed_tokens,
        "gen_ai.usage.output_tokens": output,
        "pagekv.request_id": command.request_id,
        "pagekv.n": command.n,
        "pagekv.end": trace.how.value,
        "pagekv.cached_tokens": max((s.cached_tokens or 0 for s in sequences), default=0),
        "pagekv.preemptions": sum(s.preemptions for s in sequences),
    }
    if trace.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = tuple(trace.finish_reasons)
    if trace.first_token:
        attributes["pagekv.time_to_first_token_s"] = (trace.first_token - trace.start) * 1e-9
    if trace.dropped:
        attributes["pagekv.dropped_spans"] = trace.dropped
    return attributes
