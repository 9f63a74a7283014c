"""Seconds between tokens, for whole steps at once: held against a model that does it token by token."""

from __future__ import annotations

import random

import pytest

from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.observe.metrics.inter_token_latency import InterTokenLatency
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, live_request

BOUNDS = [0.5, 1.5, 2.5, 5, 10, 20, 50]


def request(index: int, n: int = 1) -> LiveRequest:
    command = GenerateCommand(f"r{index}", [1, 2], SamplingParams(max_tokens=1000), n)
    return live_request(command, RequestStream(command.request_id, n), index, b"", 256)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_those_of_every_single_sequence(seed: int) -> None:
    """Sequences come, skip steps, leave for a while, return, change places, and end."""
    chance = random.Random(seed)
    fast, slow = Histogram(BOUNDS), Histogram(BOUNDS)
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
    assert slow.count > 100
    assert steps_alike > 50
    assert fast.buckets() == slow.buckets()
    assert abs(fast.total - slow.total) < 1e-6


def test_nothing_is_kept_of_those_that_ended() -> None:
    gaps = InterTokenLatency(Histogram(BOUNDS))
    for index in range(50):
        one = request(index)
        gaps.take(one.sequences, float(index))
        gaps.finish(one)
    assert (gaps._last, gaps._latest, gaps._latest_set) == ({}, [], set())
