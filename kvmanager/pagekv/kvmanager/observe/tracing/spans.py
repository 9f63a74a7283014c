"""The phases of a request and their times: queued, prefill chunks, decode, preempted, swapped out. No OpenTelemetry.

A step in which nothing begins or ends costs two calls; spans are handed on when their request has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import Committed, NewSeq, StepPlan, StepResult

# Spans of one request at most; more are counted and dropped.
MAX_SPANS = 256

# Wall clock that never steps back: nanoseconds since 1970.
_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def wall_ns() -> int:
    """The time now, in nanoseconds since 1970."""
    return _OFFSET_NS + time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one sequence, from `start` to `end`, nanoseconds since 1970."""

    name: str
    start: int
    end: int
    # Index of the sequence within the request.
    sequence: int
    # Tokens computed by a prefill chunk, or sampled during a decode, the first one included; else 0.
    tokens: int = 0


@dataclass(slots=True)
class TracedRequest:
    """A request from `start` to `end`."""

    request: LiveRequest
    model: str
    start: int
    end: int = 0
    how: RequestEnd = RequestEnd.FINISHED
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    # In the order in which sequences ended; stop strings, which no step reports, are left out.
    finish_reasons: list[str] = field(default_factory=list)
    first_token: int = 0

    def add(self, span: Span) -> None:
        """Adds a span unless there are too many."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1


@dataclass(slots=True, eq=False)
class _Progress:
    """The present phase of one sequence; a beam search has one for all of its beams."""

    trace: TracedRequest
    index: int
    # Name of the span under way, and when it began.
    doing: str
    since: int
    # Tokens that the sequence had when it entered the executor.
    had: int = 0
    # Known tokens of this stay at the executor that are not planned yet.
    left: int = 0
    stays: int = 0

    def turn(self, doing: str, now: int, tokens: int = 0) -> None:
        """Ends the present span and begins another; a prefill has the spans of its chunks instead."""
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
    # Computes the first token of this stay.
    is_last: bool


_QUEUED, _PREFILL, _CHUNK, _DECODE, _SEARCH = "queued", "prefill", "prefill chunk", "decode", "beam search"
_PREEMPTED, _SWAPPED, _LOST, _OVER = "preempted", "swapped", "executor lost", ""


class RequestSpans(Observer):
    """Notes the phases of every request, and hands it on when it has ended."""

    def __init__(self, emit: Callable[[TracedRequest], None], clock: Callable[[], int] = wall_ns) -> None:
        """`emit` must neither block nor raise. `clock` gives nanoseconds since 1970."""
        self._emit = emit
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
        trace = self._traces[request] = TracedRequest(request, self._model, now)
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
        progress.had = len(new.token_ids)
        progress.stays += 1
        self._prefilling[new.seq_id] = progress

    def _cut(self, plan: StepPlan, chunks: list[_Chunk], now: int) -> None:
        """Notes the parts of prompts that the step computes."""
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
            # Steps run one after the other, so a step begins when the one before it is done.
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
        self._emit(trace)

    def _of(self, sequence: Seq) -> _Progress | None:
        of_request = self._progress.get(sequence.request, {})
        return of_request.get(0 if sequence.request.search is not None else sequence.index)

    def _end_phase(self, sequence: Seq, doing: str, now: int) -> None:
        """Begins the phase `doing` of a sequence that leaves the executor, its counts up to date."""
        progress = self._of(sequence)
        if progress is None or progress.doing in (doing, _OVER):
            return
        for seq_id, other in list(self._prefilling.items()):
            if other is progress:
                del self._prefilling[seq_id]
        decoded = sequence.num_tokens - progress.had if progress.doing == _DECODE else 0
        progress.turn(doing, now, decoded)
