"""A load generator: random prompts against a running stack, closed loop or Poisson arrivals, and measurements.

A request's first token waits for the queue and the prompt, later tokens wait for steps shared with other requests. The
two latencies have different causes, so each has its own objective.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, quantiles

from pagekv.client.aio import AsyncPageKVClient
from pagekv.client.errors import PageKVError


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send; all of them are drawn from `seed`."""

    requests: int
    # Closed loop: this many requests at once, each followed by the next. None: open loop at `rate`.
    concurrency: int | None
    # Open loop: requests per second with exponential gaps (Poisson arrivals), independent of the answers.
    rate: float | None
    # A prompt's own tokens, and generated tokens; both are uniform between the two numbers.
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    # Number of tokens at the beginning of every prompt that all prompts have in common.
    shared_prefix: int
    temperature: float
    seed: int

    def shape(self) -> str:
        """One line for the head of a report."""
        how = f"closed loop of {self.concurrency}" if self.rate is None else f"Poisson arrivals at {self.rate:g}/s"
        parts = [f"{self.requests} requests", how, f"prompts of {_span(self.prompt_tokens)} tokens"]
        if self.shared_prefix:
            parts[-1] += f" after a shared prefix of {self.shared_prefix}"
        parts.append(f"{_span(self.output_tokens)} output tokens")
        parts.append("greedy" if self.temperature == 0 else f"temperature {self.temperature:g}")
        return ", ".join([*parts, f"seed {self.seed}"])


def _span(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}" if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request of the workload."""

    prompt_ids: list[int]
    output_tokens: int
    seed: int
    # Seconds after the start at which the request is due; 0 in a closed loop.
    due_s: float


@dataclass(slots=True)
class LoadOutcome:
    """The result of one request. Times are seconds since the request was due, so waiting in this process counts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    # One gap for each token after the first message. Tokens of one message share the gap before it evenly.
    inter_token_s: list[float] = field(default_factory=list)
    error: str | None = None


class Diagnosis(Enum):
    """The likely cause of a request's latencies: the first that applies, since a late first token delays the others."""

    PREFILL = "prefill, admission or chunking"
    DECODE = "decode pressure or KV budget"
    WITHIN = "within objectives"


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in milliseconds, inclusive."""

    ttft_ms: float = 500.0
    inter_token_ms: float = 50.0

    def diagnose(self, ttft_ms: float, inter_token_ms: float) -> Diagnosis:
        """`inter_token_ms` is the mean of one request; 0 when it had one token."""
        if ttft_ms > self.ttft_ms:
            return Diagnosis.PREFILL
        if inter_token_ms > self.inter_token_ms:
            return Diagnosis.DECODE
        return Diagnosis.WITHIN


@dataclass(frozen=True, slots=True)
class LatencySpread:
    """Percentiles (linear between ranks), mean and maximum of a measure, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> LatencySpread | None:
        """The spread of the values; None if there are none."""
        if not values:
            return None
        # `quantiles` needs at least two values.
        cuts = quantiles(values if len(values) > 1 else [*values] * 2, n=100, method="inclusive")
        return LatencySpread(cuts[49], cuts[89], cuts[98], fmean(values), max(values))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The measurements. Rates are over the whole run; failed requests count only as errors."""

    seconds: float
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    # Cached share of the prompt tokens, 0 to 1.
    hit_rate: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: LatencySpread | None
    inter_token_s: LatencySpread | None
    total_s: LatencySpread | None
    # Number of requests by the likely cause of their latencies (`Diagnosis` values).
    diagnoses: dict[str, int]


def make_jobs(
    workload: Workload, vocab_size: int, avoid: Sequence[int] = (), text_ids: Sequence[int] = ()
) -> list[LoadJob]:
    """The requests of a workload. Prompts are pieces of `text_ids` if these are given, else random ids below
    `vocab_size`, except those to `avoid`. Raises ValueError if given `text_ids` are shorter than the longest prompt.
    """
    rng = random.Random(workload.seed)
    longest = max(workload.prompt_tokens[1], workload.shared_prefix)
    if text_ids and len(text_ids) < longest:
        raise ValueError(f"the text has {len(text_ids)} tokens, and the longest prompt needs {longest}")
    allowed = sorted({*range(vocab_size)} - {*avoid})

    def tokens(count: int) -> list[int]:
        if not text_ids:
            return rng.choices(allowed, k=count)
        start = rng.randint(0, len(text_ids) - count)
        return list(text_ids[start : start + count])

    prefix = tokens(workload.shared_prefix)
    jobs, due_s = [], 0.0
    for _ in range(workload.requests):
        if workload.rate is not None:
            due_s += rng.expovariate(workload.rate)
        prompt = [*prefix, *tokens(rng.randint(*workload.prompt_tokens))]
        jobs.append(LoadJob(prompt, rng.randint(*workload.output_tokens), rng.getrandbits(32), due_s))
    return jobs


async def run_jobs(
    client: AsyncPageKVClient,
    workload: Workload,
    jobs: Sequence[LoadJob],
    on_progress: Callable[[int, int], object] = lambda requests, tokens: None,
    objectives: Objectives = Objectives(),
) -> LoadReport:
    """Sends the jobs and measures. `on_progress` gets the numbers of ended requests and generated tokens so far; what
    it raises ends the run.
    """
    outcomes: list[LoadOutcome] = []
    tokens = 0
    begun = time.perf_counter()

    def on_tokens(count: int) -> None:
        nonlocal tokens
        tokens += count
        on_progress(len(outcomes), tokens)

    # A refusal or a lost connection counts as a failure; retries would hide it in the latencies.
    client = client.with_options(max_retries=0, resume_timeout=0)

    async def one(job: LoadJob, due: float) -> None:
        outcomes.append(await _measure(client, workload.temperature, job, due, on_tokens))
        on_tokens(0)

    try:
        if workload.rate is None:
            waiting = iter(jobs)

            async def worker() -> None:
                for job in waiting:
                    await one(job, time.perf_counter())

            async with asyncio.TaskGroup() as group:
                for _ in range(min(workload.concurrency or 1, len(jobs))):
                    group.create_task(worker())
        else:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    due = begun + job.due_s
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(one(job, due))
    except ExceptionGroup as group:
        # Of `on_progress`, whose caller knows no tasks.
        raise group.exceptions[0] from None
    return summarise(outcomes, time.perf_counter() - begun, objectives)


async def _measure(
    client: AsyncPageKVClient, temperature: float, job: LoadJob, due: float, on_tokens: Callable[[int], None]
) -> LoadOutcome:
    """Sends one job; `on_tokens` gets the number of tokens of every message."""
    outcome = LoadOutcome()
    last = due
    stream = client.stream(
        job.prompt_ids, max_tokens=job.output_tokens, temperature=temperature, seed=job.seed, ignore_eos=True
    )
    try:
        async with stream:
            async for chunk in stream:
                now, count = time.perf_counter(), len(chunk.token_ids)
                if not count:  # the end alone
                    continue
                if outcome.ttft_s is None:
                    outcome.ttft_s = now - due
                else:
                    outcome.inter_token_s += [(now - last) / count] * count
                last = now
                on_tokens(count)
    except PageKVError as error:
        outcome.error = type(error).__name__
        return outcome
    end = stream.completion
    outcome.total_s = time.perf_counter() - due
    outcome.prompt_tokens, outcome.cached_tokens = end.prompt_tokens, end.cached_tokens
    outcome.output_tokens = end.completion_tokens
    return outcome


def summarise(outcomes: Sequence[LoadOutcome], seconds: float, objectives: Objectives = Objectives()) -> LoadReport:
    def diagnosis(outcome: LoadOutcome) -> str:
        ttft_s, gaps = outcome.ttft_s or 0.0, outcome.inter_token_s
        return objectives.diagnose(1e3 * ttft_s, 1e3 * fmean(gaps) if gaps else 0.0).value

    good = [outcome for outcome in outcomes if outcome.error is None]
    prompt, cached, output = (
        sum(getattr(outcome, name) for outcome in good) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    return LoadReport(
        seconds=seconds,
        completed=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        hit_rate=cached / prompt if prompt else 0.0,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        ttft_s=LatencySpread.of([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        inter_token_s=LatencySpread.of([gap for outcome in good for gap in outcome.inter_token_s]),
        total_s=LatencySpread.of([outcome.total_s for outcome in good]),
        diagnoses=dict(Counter(diagnosis(outcome) for outcome in good if outcome.ttft_s is not None)),
    )
