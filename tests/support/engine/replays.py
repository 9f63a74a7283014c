"""Options and random workload traces for tests of replays."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from pagekv.kvmanager.replay.options import ReplayOptions, StepCost
from pagekv.kvmanager.replay.trace import TraceRecord, read_trace

SAMPLE = read_trace(Path(__file__).resolve().parents[2] / "data" / "traces" / "mooncake_sample.jsonl")
OPTIONS = ReplayOptions(
    block_size=512,
    tokens_per_id=512,
    partial_blocks=True,
    protected_share=0.2,
    speed=1.0,
    max_batch_tokens=2048,
    max_running=64,
    watermark=0.01,
    pipeline_depth=2,
    cost=StepCost(),
)
# Small blocks, so that a few records of a few tokens exercise everything.
SMALL = replace(OPTIONS, block_size=4, tokens_per_id=4, max_batch_tokens=24, max_running=8, watermark=0.0)


def ignore(done: int) -> None:
    pass


def random_trace(seed: int, count: int = 60, longest: int = 10) -> list[TraceRecord]:
    """Conversations over few ids: prompts extend, repeat and cut earlier ones."""
    rng = random.Random(seed)
    records: list[TraceRecord] = []
    chains: list[tuple[int, ...]] = [()]
    fresh = 0
    for index in range(count):
        kept = rng.choice(chains[-8:])
        ids = list(kept[: rng.randint(0, len(kept))])
        while not ids or (len(ids) < longest and rng.random() < 0.6):
            ids.append(fresh)
            fresh += 1
        # How full the last block is depends on its id, as it does in traces, whose ids are hashes of content.
        length = 4 * len(ids) - ids[-1] % 4
        chains.append(tuple(ids))
        records.append(TraceRecord(index * rng.random() * 0.01, length, rng.randint(1, 12), tuple(ids)))
    return records


SMALLER = random_trace(seed=99)
