"""Random requests through the real engine loop and a real oracle: shared prefixes, cancels, a tiny pool, chunks.

The engine loop runs in the test's process, so `check_engine` can be called while it works.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass

import pytest
from support.clients.stack import running_executor
from support.engine.integrity import check_engine
from support.executor.expected_tokens import expected_tokens

from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_REQUESTS = int(os.environ.get("PAGEKV_TEST_REQUESTS", "10000"))
CONCURRENCY = 48
VOCAB = 64
EOS = 0


@dataclass
class Tally:
    completed: int = 0
    cancelled: int = 0
    tokens: int = 0


def random_command(rng: random.Random, number: int, families: list[list[int]]) -> GenerateCommand:
    """Most prompts continue one of a few common prefixes, cut anywhere, so that hits, misses and evictions mix."""
    family = rng.choice(families)
    prompt = family[: rng.randint(1, len(family))] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 24))]
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randint(1, 24),
        seed=rng.randrange(2**64),
        ignore_eos=rng.random() < 0.3,
    )
    identity = CacheIdentity(
        namespace=rng.choice(["", "", "", "other"]), read=rng.random() < 0.95, write=rng.random() < 0.95
    )
    return GenerateCommand(
        f"r{number}", prompt, sampling, identity=identity, priority=rng.choice([0, 0, 0, 1]), n=rng.choice([1, 1, 1, 2])
    )


async def one(engine: EngineLoop, rng: random.Random, command: GenerateCommand, tally: Tally) -> None:
    stream = engine.submit(command)
    outputs: dict[int, list[int]] = {index: [] for index in range(command.n)}
    aborted = False
    cancel_after = rng.randint(0, 6) if rng.random() < 0.15 else None
    while deltas := await stream.take():
        for delta in deltas:
            outputs[delta.index] += delta.token_ids
            aborted = aborted or delta.finish is FinishReason.ABORT
        if cancel_after is not None and sum(map(len, outputs.values())) >= cancel_after:
            engine.abort(command.request_id)
    for index, tokens in outputs.items():
        wanted = expected_tokens(
            command.prompt_ids,
            command.sampling.max_tokens,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            ignore_eos=command.sampling.ignore_eos,
            temperature=command.sampling.temperature,
            seed=command.sampling.seed,
            sequence_index=index,
        )
        assert tokens == (wanted[: len(tokens)] if aborted else wanted), command
        tally.tokens += len(tokens)
    tally.cancelled += aborted
    tally.completed += not aborted


def test_every_output_of_ten_thousand_random_requests_is_right() -> None:
    rng = random.Random(11)
    families = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(20, 120))] for _ in range(6)]
    commands = iter([random_command(rng, number, families) for number in range(NUM_REQUESTS)])
    limits = SchedulerLimits(max_batch_tokens=96, max_running=32, watermark=0.01, prefix_cache=True)
    tally = Tally()

    async def run(target: str) -> EngineLoop:
        engine = EngineLoop(
            EngineConfig(
                executor=target,
                block_size=8,
                num_device_blocks=120,
                max_queue=1000,
                max_unread=1000000,
                step_timeout_s=600,
                limits=limits,
            )
        )
        loop = asyncio.create_task(engine.run())
        await engine.wait_ready()

        async def worker(number: int) -> None:
            for command in commands:
                await one(engine, random.Random(command.request_id), command, tally)
                if number == 0:
                    check_engine(engine.queries)

        await asyncio.gather(*(worker(number) for number in range(CONCURRENCY)))
        check_engine(engine.queries)
        await engine.stop(5)
        await loop
        return engine

    args = [
        "--backend",
        "oracle",
        "--model",
        "",
        "--vocab-size",
        str(VOCAB),
        "--max-model-len",
        "512",
        "--eos",
        str(EOS),
    ]
    with running_executor(args) as executor:
        stats = asyncio.run(run(executor.target)).statistics.stats()
    print(f"\n{tally.completed} completed, {tally.cancelled} cancelled, {tally.tokens} tokens; {stats}")
    assert tally.completed + tally.cancelled == NUM_REQUESTS
    assert tally.cancelled > NUM_REQUESTS // 50
    assert stats.active_blocks == 0
    assert stats.executor_restarts_total == 0
    # The load was what the test says it is.
    assert stats.preemptions_total > NUM_REQUESTS // 100
    assert stats.evicted_blocks_total > NUM_REQUESTS
    assert stats.prefix_hit_rate > 0.2
