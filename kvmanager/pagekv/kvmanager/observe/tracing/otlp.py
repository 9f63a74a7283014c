"""Requests as OpenTelemetry spans, sent to a collector over OTLP/HTTP from a thread of its own.

Spans that the collector does not take in time are dropped: the queue of the exporter's thread is bounded, and nothing
waits for it. Spans hold counts, times and the request's id; no text and no tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagekv.kvmanager.engine.observer import RequestEnd
from pagekv.kvmanager.observe.tracing.spans import TracedRequest

_ROOT = "generate"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
# Seconds that queued spans get to leave at the end.
FLUSH_S = 5.0


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends to this URL in batches. Sizes and delays can be set with OpenTelemetry's own OTEL_BSP_* variables."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


class Tracing:
    """Turns ended requests into spans. No state is global; callers and OTEL_TRACES_SAMPLER decide which are sampled.

    Spans are made whole, when their times are known already: a tracer that starts and ends them costs eight times as
    much (112 against 14 us for a request with three spans below its own), and the next step waits for it.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` gets every span."""
        name = os.environ.get("OTEL_SERVICE_NAME", "pagekv-manager")
        resource = Resource.create({SERVICE_NAME: name})
        # Reads OpenTelemetry's variables for sampling and ids.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = processor
        self._scope = InstrumentationScope("pagekv.kvmanager")
        self._propagator = TraceContextTextMapPropagator()

    def emit(self, trace: TracedRequest) -> None:
        """Sends the spans of a request that has ended, below the span that its caller named."""
        context, command = Context(), trace.request.command
        if command.trace_parent:
            context = self._propagator.extract({"traceparent": command.trace_parent}, context)
        caller = get_current_span(context).get_span_context()
        trace_id = caller.trace_id if caller.is_valid else self._provider.id_generator.generate_trace_id()
        decision = self._provider.sampler.should_sample(context, trace_id, _ROOT, SpanKind.SERVER).decision
        if decision is not Decision.RECORD_AND_SAMPLE:
            return
        root = self._span_context(trace_id)
        for span in trace.spans:
            attributes = {"pagekv.sequence": span.sequence}
            if span.tokens:
                attributes["pagekv.tokens"] = span.tokens
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    self._span_context(trace_id),
                    root,
                    self._provider.resource,
                    attributes,
                    start_time=span.start,
                    end_time=span.end,
                    instrumentation_scope=self._scope,
                )
            )
        self._processor.on_end(
            ReadableSpan(
                _ROOT,
                root,
                caller if caller.is_valid else None,
                self._provider.resource,
                _attributes(trace),
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR if trace.how is RequestEnd.FAILED else StatusCode.UNSET),
                start_time=trace.start,
                end_time=trace.end,
                instrumentation_scope=self._scope,
            )
        )

    def _span_context(self, trace_id: int) -> SpanContext:
        return SpanContext(trace_id, self._provider.id_generator.generate_span_id(), False, _SAMPLED)

    async def close(self) -> None:
        """Sends queued spans for at most FLUSH_S seconds."""
        thread = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)


def _attributes(trace: TracedRequest) -> dict[str, str | int | float | tuple[str, ...]]:
    """Names as in OpenTelemetry's conventions for generative AI where it has one."""
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
