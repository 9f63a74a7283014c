"""Requests as OpenTelemetry spans, sent to a collector over OTLP/HTTP from a thread of its own.

What the collector does not take in time is dropped, never waited for: the queue of the exporter's thread is bounded.
Spans hold counts, times and the request's id; no text and no tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagekv.kvmanager.observer import RequestEnd
from pagekv.kvmanager.request_spans import RequestTrace

# Seconds that what is queued gets to leave at the end.
FLUSH_S = 5.0


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends to this URL in batches. Sizes and delays can be set with OpenTelemetry's own OTEL_BSP_* variables."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


class Tracing:
    """A tracer of its own: nothing global. Which requests are sampled follows their parents and OTEL_TRACES_SAMPLER."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` gets every span that ends."""
        name = os.environ.get("OTEL_SERVICE_NAME", "pagekv-manager")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pagekv.kvmanager")
        self._propagator = TraceContextTextMapPropagator()

    def emit(self, trace: RequestTrace) -> None:
        """The spans of a request that has ended, below the span that its caller named."""
        command = trace.request.command
        parent = Context()
        if command.trace_parent:
            parent = self._propagator.extract({"traceparent": command.trace_parent}, parent)
        root = self._tracer.start_span("generate", parent, SpanKind.SERVER, start_time=trace.start)
        if root.is_recording():
            root.set_attributes(_attributes(trace))
            if trace.how is RequestEnd.FAILED:
                root.set_status(Status(StatusCode.ERROR))
            within = set_span_in_context(root, Context())
            for span in trace.spans:
                attributes = {"pagekv.sequence": span.sequence}
                if span.tokens:
                    attributes["pagekv.tokens"] = span.tokens
                self._tracer.start_span(span.name, within, attributes=attributes, start_time=span.start).end(span.end)
        root.end(trace.end)

    async def close(self) -> None:
        """Sends what is queued, for a while."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)


def _attributes(trace: RequestTrace) -> dict[str, str | int | float | list[str]]:
    """Names as in OpenTelemetry's conventions for generative AI where it has one."""
    request, command = trace.request, trace.request.command
    sequences = request.sequences
    if request.search is None:
        output = sum(sequence.num_output - command.resumed_tokens for sequence in sequences)
    else:
        output = sum(len(result.token_ids) for result in request.search.results())
    attributes: dict[str, str | int | float | list[str]] = {
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
        attributes["gen_ai.response.finish_reasons"] = trace.finish_reasons
    if trace.first_token:
        attributes["pagekv.time_to_first_token_s"] = (trace.first_token - trace.start) * 1e-9
    if trace.dropped:
        attributes["pagekv.dropped_spans"] = trace.dropped
    return attributes
