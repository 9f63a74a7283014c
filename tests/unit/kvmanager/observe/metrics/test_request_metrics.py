"""Times and sizes of requests, by a clock that ticks whenever it is read; histograms, with Prometheus' meaning of a
bound; gaps between tokens for whole steps at once, held against a model that does it token by token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.observe.metrics.request_metrics import Histogram, InterTokenLatency, RequestMetrics
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, live_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_latencies_are_those_of_the_clock() -> None:
    """Prefill and decode have histograms of their own."""
    ticks = count()
    requests = RequestMetrics(clock=lambda: float(next(ticks)))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT, max_tokens=4)))

    harness.run(body, observers=[requests])
    # Read when the request is queued (0), planned (1), at four commits (2 to 5), and at the end (6).
    assert requests.queue_time.total == 1
    assert requests.time_to_first_token.total == 2
    assert requests.prefill_time.total == 1
    assert requests.inter_token_latency.buckets()[-1][1] == requests.inter_token_latency.total == 3
    assert requests.decode_time.total == 4
    assert requests.e2e_latency.total == 6


def test_sizes_and_ends_are_counted_and_nothing_is_kept() -> None:
    requests = RequestMetrics()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", PROMPT, max_tokens=4, n=2)))

    harness.run(body, observers=[requests])
    assert (requests.prompt_tokens.buckets()[-1][1], requests.prompt_tokens.total) == (1, 9)
    assert (requests.generation_tokens.buckets()[-1][1], requests.generation_tokens.total) == (2, 8)
    assert requests.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert requests.step_seconds.buckets()[-1][1] == requests.step_tokens.buckets()[-1][1] >= 4
    assert requests._live == {}


def histogram(bounds: Sequence[float]) -> Histogram:
    return Histogram("name", "help", bounds)


def test_a_value_counts_up_to_and_with_its_bound() -> None:
    found = histogram([0.1, 1])
    for value in (0.05, 0.1, 0.2, 1, 1.5):
        found.observe(value)
    assert found.buckets() == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert round(found.total, 9) == 2.85


def test_a_weight_counts_like_single_values() -> None:
    values = [0.05, 0.1, 0.1, 0.1, 7.0, 0.5]
    single, weighted = (histogram([0.1, 0.5, 1]) for _ in range(2))
    for value in values:
        single.observe(value)
    for value in set(values):
        weighted.observe(value, values.count(value))
    assert weighted.buckets() == single.buckets()
    assert abs(weighted.total - single.total) < 1e-9


BOUNDS = [0.5, 1.5, 2.5, 5, 10, 20, 50]


def request(index: int, n: int = 1) -> LiveRequest:
    command = GenerateCommand(f"r{index}", [1, 2], SamplingParams(max_tokens=1000), n)
    return live_request(command, RequestStream(command.request_id, n), index, b"", 256)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_those_of_every_single_sequence(seed: int) -> None:
    """Sequences come, skip steps, leave for a while, return, change places, and end."""
    chance = random.Random(seed)
    fast, slow = histogram(BOUNDS), histogram(BOUNDS)
    gaps = InterTokenLatency(fast)
    latest: dict[Seq, float] = {}
    waiting: list[Seq] = []
    running: list[Seq] = []
    before: list[Seq] = []
    now, steps_alike = 0.0, 0
    for index in range(400):
        now += chance.choice([1.0, 1.0, 2.0, 7.0])
        if chance.random() < 0.4:
            if chance.random() < 0.7:
                waiting += request(index, chance.choice([1, 1, 3])).sequences
            for sequence in waiting[: chance.randrange(3)]:
                waiting.remove(sequence)
                running.insert(chance.randrange(len(running) + 1), sequence)
        skipped = chance.random() < 0.3
        sampled = [sequence for sequence in running if not skipped or chance.random() < 0.8]
        steps_alike += bool(sampled) and sampled == before
        before = sampled
        first = gaps.take(sampled, now)
        assert [sampled[position] for position in first] == [each for each in sampled if each not in latest]
        for sequence in sampled:
            if sequence in latest:
                slow.observe(now - latest[sequence])
            latest[sequence] = now
        if chance.random() < 0.1:
            # Preempted, or the whole executor is lost.
            for sequence in chance.sample(running, chance.choice([min(1, len(running)), len(running)])):
                running.remove(sequence)
                waiting.append(sequence)
        if running and chance.random() < 0.1:
            ended = chance.choice(running).request
            gaps.finish(ended)
            running = [each for each in running if each.request is not ended]
            waiting = [each for each in waiting if each.request is not ended]
    assert slow.buckets()[-1][1] > 100
    assert steps_alike > 50
    assert fast.buckets() == slow.buckets()
    assert abs(fast.total - slow.total) < 1e-6


def test_nothing_is_kept_of_those_that_ended() -> None:
    gaps = InterTokenLatency(histogram(BOUNDS))
    for index in range(50):
        one = request(index)
        gaps.take(one.sequences, float(index))
        gaps.finish(one)
    assert (gaps._last, gaps._latest, gaps._latest_set) == ({}, [], set())
