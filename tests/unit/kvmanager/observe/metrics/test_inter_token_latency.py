"""Seconds between tokens, for whole steps at once: held against a model that does it token by token."""

from __future__ import annotations

import random

import pytest

from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.observe.metrics.inter_token_latency import InterTokenLatency
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, LiveRequest, Seq, live_request
from pagekv.kvmanager.scheduling.step_plan import NewSeq

BOUNDS = [0.5, 1.5, 2.5, 5, 10, 20, 50]


def request(index: int, n: int = 1) -> LiveRequest:
    command = GenerateCommand(f"r{index}", [1, 2], SamplingParams(max_tokens=1000), n)
    return live_request(command, RequestStream(command.request_id, n), index, b"", 256)


def entered(sequence: Seq, seq_id: int) -> NewSeq:
    return NewSeq(sequence, seq_id, sequence.token_ids, sequence.block_table, 0)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_those_of_every_single_sequence(seed: int) -> None:
    """Sequences come, skip steps, leave for a while, return under other seq_ids, end, and pass their seq_ids on."""
    chance = random.Random(seed)
    fast, slow = Histogram(BOUNDS), Histogram(BOUNDS)
    gaps = InterTokenLatency(fast)
    latest: dict[Seq, float] = {}
    waiting: list[Seq] = []
    running: dict[int, Seq] = {}
    now, steps_alike = 0.0, 0
    for index in range(400):
        now += chance.choice([1.0, 1.0, 2.0, 7.0])
        new = []
        if chance.random() < 0.4:
            if chance.random() < 0.7:
                waiting += request(index, chance.choice([1, 1, 3])).sequences
            for sequence in waiting[: chance.randrange(3)]:
                waiting.remove(sequence)
                # Past 64, so that the column grows.
                seq_id = chance.choice([h for h in range(100) if h not in running])
                running[seq_id] = sequence
                new.append(entered(sequence, seq_id))
        if new:
            gaps.open(new)
        else:
            steps_alike += 1
        seq_ids = sorted(h for h in running if chance.random() < 0.95)
        first = gaps.take(seq_ids, now)
        assert [running[seq_ids[p]] for p in first] == [running[h] for h in seq_ids if running[h] not in latest]
        for seq_id in seq_ids:
            sequence = running[seq_id]
            if sequence in latest:
                slow.observe(now - latest[sequence])
            latest[sequence] = now
        if chance.random() < 0.2:
            # Preempted, or the whole executor is lost.
            for seq_id in chance.sample(sorted(running), chance.choice([min(1, len(running)), len(running)])):
                waiting.append(running.pop(seq_id))
        if running and chance.random() < 0.1:
            seq_id = chance.choice(sorted(running))
            ended = running[seq_id].request
            gaps.forget(ended)
            running = {h: s for h, s in running.items() if s.request is not ended}
            waiting = [s for s in waiting if s.request is not ended]
    assert slow.count > 100
    assert steps_alike > 100
    assert fast.buckets() == slow.buckets()
    assert abs(fast.total - slow.total) < 1e-6


def test_nothing_is_kept_of_those_that_ended() -> None:
    gaps = InterTokenLatency(Histogram(BOUNDS))
    for index in range(50):
        one = request(index)
        assert one.sequences[0].seq_id == NO_SEQ_ID
        gaps.open([entered(one.sequences[0], index % 3)])
        gaps.take([index % 3], float(index))
        gaps.forget(one)
    kept = [owner for owner in gaps._owners if owner is not None]
    assert (kept, gaps._seq_ids, gaps._away) == ([], {}, {})
