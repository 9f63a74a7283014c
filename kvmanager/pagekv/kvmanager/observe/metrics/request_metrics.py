"""Times and sizes of requests and steps, as histograms. Names, buckets and meanings are those of docs/metrics.md.

A step costs two observations, and one more for the tokens of all its sequences together. Python work for a single
sequence is done only when it enters, gets its first token, or ends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import Committed, StepPlan, StepResult

# Upper bounds of buckets in seconds: vLLM's, with finer ones at the low end for small models and fast requests.
LATENCY = (
    *(0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80, 160, 640, 2560),
)
INTER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)

# Most adapters with counts of their own: names come from clients, and a scrape has a line for each. Later adapters are
# counted together, under a name that no adapter has.
MAX_ADAPTERS = 100
OTHER_ADAPTERS = "(other)"

# How a sequence ended, in vLLM's words.
REASONS = ("stop", "length", "abort", "error")
_REST = {RequestEnd.FINISHED: "stop", RequestEnd.ABORTED: "abort", RequestEnd.FAILED: "error"}


class Histogram:
    """Counts by bucket. It can observe many equal values at once; prometheus-client's histogram takes one at a time,
    with a lock for each.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds` ascend. A bucket counts values above the bound before it, up to and including its own bound."""
        self.name, self.text = name, text
        self._bounds = list(bounds)
        # The last count is of values above every bound.
        self._counts = [0] * (len(self._bounds) + 1)
        # Sum of all values.
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus writes them; the last bound is +Inf."""
        bounds = [*(f"{float(bound)}" for bound in self._bounds), "+Inf"]
        return [*zip(bounds, accumulate(self._counts), strict=True)]


class InterTokenLatency:
    """Seconds between the tokens of each sequence, observed for all sequences of a step at once. In steady state the
    same sequences get a token in every step and have all waited equally long: one observation with a weight. A sequence
    that comes back after a preemption or a lost executor has waited since its latest token.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        # Sequences that got a token in the latest step, in the step's order, and the time of the step.
        self._latest: list[Seq] = []
        self._latest_set: set[Seq] = set()
        self._latest_at = 0.0
        # By every other live sequence that has a token: the time of its latest token, in seconds.
        self._last: dict[Seq, float] = {}

    def take(self, sequences: list[Seq], now: float) -> list[int]:
        """Observes a token for each sequence; returns the positions of the sequences that got their first token."""
        if not sequences:
            return []
        first: list[int] = []
        before = self._latest_set
        if sequences == self._latest:
            stayed = len(sequences)
        else:
            self._latest, self._latest_set = sequences, set(sequences)
            self._last |= dict.fromkeys(before - self._latest_set, self._latest_at)
            stayed = len(before & self._latest_set)
            for position, sequence in enumerate(sequences) if stayed < len(sequences) else ():
                if sequence not in before:
                    last = self._last.pop(sequence, None)
                    if last is None:
                        first.append(position)
                    else:
                        self._histogram.observe(now - last)
        if stayed:
            self._histogram.observe(now - self._latest_at, stayed)
        self._latest_at = now
        return first

    def finish(self, request: LiveRequest) -> None:
        """Removes a request that has ended."""
        for sequence in request.sequences:
            self._last.pop(sequence, None)
            if sequence in self._latest_set:
                self._latest_set.remove(sequence)
                self._latest = []


@dataclass(slots=True)
class _Progress:
    """Times of one request, in seconds on the clock."""

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    # Sequences whose end was counted.
    ended: int = 0


class RequestMetrics(Observer):
    """The histograms, and cumulative counts: `finished`, sequences by reason; by adapter ("": none), `prompts`, prompt
    tokens, and `cached`, those of them that were found in the prefix cache.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[LiveRequest, _Progress] = {}
        self.finished = dict.fromkeys(REASONS, 0)
        self.prompts = {"": 0}
        self.cached = {"": 0}
        self.histograms: list[Histogram] = []
        add = self._histogram
        first_text, prefill_text = "From queued to the first token", "From the first step to the first token"
        self.time_to_first_token = add("vllm:time_to_first_token_seconds", first_text, FIRST_TOKEN)
        self.inter_token_latency = add("vllm:inter_token_latency_seconds", "Between tokens of a sequence", INTER_TOKEN)
        self.e2e_latency = add("vllm:e2e_request_latency_seconds", "From queued to the end", LATENCY)
        self.queue_time = add("vllm:request_queue_time_seconds", "From queued to the first step", LATENCY)
        self.prefill_time = add("vllm:request_prefill_time_seconds", prefill_text, LATENCY)
        self.decode_time = add("vllm:request_decode_time_seconds", "From the first token to the end", LATENCY)
        self.prompt_tokens = add("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.generation_tokens = add("vllm:request_generation_tokens", "Tokens generated for a sequence", TOKENS)
        self.step_seconds = add("pagekv_step_seconds", "A step in the executor", STEP)
        self.step_tokens = add("pagekv_step_tokens", "Tokens computed in a step", TOKENS)
        self._inter_token = InterTokenLatency(self.inter_token_latency)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        self.histograms.append(Histogram(name, text, bounds))
        return self.histograms[-1]

    def submitted(self, request: LiveRequest) -> None:
        self._live[request] = _Progress(self._clock())

    def planned(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._count_prompt(admitted.sequence)
        if not plan.new:
            return
        now = self._clock()
        for new in plan.new:
            progress = self._live.get(new.sequence.request)
            if progress is not None and progress.scheduled is None:
                progress.scheduled = now
                self.queue_time.observe(now - progress.submitted)

    def _count_prompt(self, sequence: Seq) -> None:
        adapter = sequence.request.command.identity.adapter_id
        if adapter not in self.prompts and len(self.prompts) > MAX_ADAPTERS:
            adapter = OTHER_ADAPTERS
        self.prompts[adapter] = self.prompts.get(adapter, 0) + sequence.num_prompt
        self.cached[adapter] = self.cached.get(adapter, 0) + (sequence.cached_tokens or 0)

    def committed(self, plan: StepPlan, result: StepResult, committed: Committed) -> None:
        now = self._clock()
        self.step_seconds.observe(result.execute_us * 1e-6)
        self.step_tokens.observe(result.computed_tokens)
        for position in self._inter_token.take(committed.sequences, now):
            self._first_token(committed.sequences[position].request, now)
        for position, ending in committed.endings.items():
            self._count(committed.sequences[position].request, ending.reason.value)
        for request in committed.searched:
            assert request.search is not None
            self._first_token(request, now)
            for hypothesis in request.search.results():
                self._count(request, hypothesis.finish.value)

    def _first_token(self, request: LiveRequest, now: float) -> None:
        progress = self._live.get(request)
        if progress is not None:
            self.time_to_first_token.observe(now - progress.submitted)
            if progress.first_token is None:
                progress.first_token = now

    def _count(self, request: LiveRequest, reason: str) -> None:
        self.finished[reason] += 1
        progress = self._live.get(request)
        if progress is not None:
            progress.ended += 1

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        self._inter_token.finish(request)
        progress = self._live.pop(request, None)
        if progress is None:
            return
        # Ends by a stop string are found by the reader of the stream; no step reports them.
        self.finished[_REST[end]] += request.command.n - progress.ended
        if end is not RequestEnd.FINISHED:
            return
        now, resumed = self._clock(), request.command.resumed_tokens
        self.e2e_latency.observe(now - progress.submitted)
        if progress.scheduled is not None and progress.first_token is not None:
            self.prefill_time.observe(progress.first_token - progress.scheduled)
            self.decode_time.observe(now - progress.first_token)
        self.prompt_tokens.observe(len(request.command.prompt_ids) - resumed)
        if request.search is None:
            for sequence in request.sequences:
                self.generation_tokens.observe(sequence.num_output - resumed)
        else:
            for result in request.search.results():
                self.generation_tokens.observe(len(result.token_ids))
