"""The workloads of `bench_manager.py`: each function sets one kind of work up, does it, checks it and returns samples.

Nothing is stubbed: the real scheduler over the real pool, prefix cache and token comparison on, SHA-256 identities.
Samples are seconds for one unit of work; a collection of garbage never falls into one.
"""

from __future__ import annotations

import gc
import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pagekv.kvmanager.engine.executor_wire import step_request
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, live_request
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

BLOCK_SIZE = 16
ROOT = root_digest("bench", "", "")


def scheduler(num_blocks: int, max_running: int = 2048, num_host_blocks: int = 0) -> Scheduler:
    """With the manager's defaults but for the bounds that the work needs; what `auto` is told is for swapping."""
    limits = SchedulerLimits(
        max_batch_tokens=1 << 20,
        max_running=max_running,
        watermark=0.01,
        prefix_cache=True,
        swap=SwapPolicy("auto", 1, 1 << 40, 1 << 40, 1),
    )
    return Scheduler(make_pool(num_blocks), limits, (2,), host=HostPool(num_host_blocks, BLOCK_SIZE))


def make_pool(num_blocks: int) -> BlockPool:
    """With the manager's default eviction."""
    return BlockPool(num_blocks, BLOCK_SIZE, EvictionOrder(num_blocks, "slru", 0.2))


def request(index: int, prompt: list[int], max_tokens: int) -> LiveRequest:
    """A request as the engine loop makes them."""
    command = GenerateCommand(f"r{index}", prompt, SamplingParams(max_tokens=max_tokens))
    return live_request(command, RequestStream(command.request_id, 1), index, ROOT, 256)


def result(plan: StepPlan, step: int, token: int) -> StepResult:
    """The answer of an executor: one token, which ends nobody, for everyone who samples."""
    seq_ids = plan.sampling.tolist()
    return StepResult(step, seq_ids, [token] * len(seq_ids), {}, plan.num_tokens, 0, 0)


def decode_steps(running: int, steps: int) -> list[float]:
    """Seconds for `schedule` and `commit` of a step with `running` decodes, one step ahead as in the engine loop.

    Prompt lengths are spread, so that each step has its share of sequences that fill a block. One sample is the mean of
    block_size consecutive steps: every sequence fills exactly one block in each.
    """
    engine = scheduler(running * (64 + steps // BLOCK_SIZE + 8))
    chance = random.Random(7)
    for index in range(running):
        length = 256 + index % BLOCK_SIZE
        engine.add(request(index, [chance.randrange(10, 30_000) for _ in range(length)], steps + 64))
    plan = engine.schedule()
    assert plan is not None
    before = engine.counters.generated_tokens
    samples: list[float] = []
    with _no_collection():
        for step in range(1, steps + 1):
            answer = result(plan, step, 100 + step % 50)
            begun = time.perf_counter()
            ahead = engine.schedule()
            engine.commit(plan, answer)
            samples.append(time.perf_counter() - begun)
            assert ahead is not None
            assert len(ahead.sampling) == running
            plan = ahead
    assert engine.counters.generated_tokens - before == steps * running
    engine.commit(plan, result(plan, steps + 1, 100))
    assert all(len(s.block_table) == -(-s.num_computed // BLOCK_SIZE) for s in engine.running)
    assert all(s.token_ids[-1] == 100 for s in engine.running)
    warm = samples[2 * BLOCK_SIZE :]
    groups = [warm[at : at + BLOCK_SIZE] for at in range(0, len(warm) - BLOCK_SIZE + 1, BLOCK_SIZE)]
    return [sum(group) / BLOCK_SIZE for group in groups]


def admissions(length: int, repeats: int, *, cached: bool) -> list[float]:
    """Seconds for `schedule` when it admits one waiting prompt: hash, match, allocate, publish and plan.

    The pool has been used before, as it has a minute after start: its memory is mapped, its table has grown.
    """
    engine = scheduler(2 * length // BLOCK_SIZE * (repeats + 2))
    _fill(engine.pool, engine.pool.num_blocks)
    engine.pool.clear_prefix_table()
    chance = np.random.default_rng(11)
    prompts = [chance.integers(10, 30_000, length).tolist() for _ in range(1 if cached else repeats + 1)]
    samples: list[float] = []
    with _no_collection():
        for index in range(repeats + 1):
            engine.add(request(index, prompts[0 if cached else index], 1))
            begun = time.perf_counter()
            plan = engine.schedule()
            samples.append(time.perf_counter() - begun)
            assert plan is not None
            (new,) = plan.new
            # A cached prompt is cached whole, and its last token is computed all the same.
            assert plan.num_tokens == (1 if cached and index else length)
            assert len(new.block_ids) == length // BLOCK_SIZE
            engine.commit(plan, result(plan, 1, 99))
            assert engine.pool.num_active == 0
    assert engine.pool.num_published == length // BLOCK_SIZE * (1 if cached else repeats + 1)
    return samples[1:]


def swaps(length: int, repeats: int, *, back: bool) -> list[float]:
    """Seconds for the preemption that swaps a sequence of `length` tokens out, or for the admission that brings it
    `back` after the device has evicted all of it; either with the plan and the message of its step.

    Blocks of other sequences in the host pool make room, as it does once it has filled up.
    """
    blocks = length // BLOCK_SIZE
    engine = scheduler(2 * blocks, num_host_blocks=blocks + blocks // 4)
    chance = np.random.default_rng(13)
    samples: list[float] = []
    for index in range(repeats + 1):
        added = request(index, chance.integers(10, 30_000, length).tolist(), 8)
        engine.add(added)
        first, ahead = engine.schedule(), engine.schedule()
        assert first is not None
        assert ahead is not None
        engine.commit(first, result(first, 1, 99))
        with _no_collection():
            begun = time.perf_counter()
            engine.preempt_all()
            out = engine.schedule()
            assert out is not None
            message_out = step_request(out, 1, 3, (2,))
            swapped_out = time.perf_counter()
            # Until its token is here it cannot return.
            engine.commit(ahead, result(ahead, 2, 99))
            engine.commit(out, result(out, 3, 99))
            engine.pool.clear_prefix_table()
            called = time.perf_counter()
            returned = engine.schedule()
            assert returned is not None
            message_back = step_request(returned, 1, 4, (2,))
            swapped_in = time.perf_counter()
        samples.append(swapped_in - called if back else swapped_out - begun)
        # Its last block, which it had begun, too.
        for message in (message_out, message_back):
            assert [len(operation.sources) for operation in message.memory_ops] == [blocks + 1]
        assert returned.num_tokens == 1
        engine.commit(returned, result(returned, 4, 99))
        engine.finish(added.sequences[0])
    assert engine.host.evictions > (repeats - 1) * blocks
    return samples[1:]


def hash_floor(length: int, repeats: int) -> list[float]:
    """Seconds for SHA-256 of the blocks of a prompt of `length` tokens and nothing else: the floor of a cold one."""
    chunks = [bytes([index % 251]) * (4 * BLOCK_SIZE) for index in range(length // BLOCK_SIZE)]
    samples: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        digest: bytes = ROOT
        for chunk in chunks:
            digest = hashlib.sha256(digest + chunk).digest()
        samples.append(time.perf_counter() - begun)
    return samples


def churn(num_blocks: int, repeats: int, per_sample: int = 64) -> list[float]:
    """Seconds a block for allocate, publish and free of sequences of 256 blocks while the pool is full of cached
    blocks, so that each allocation evicts. Digests are computed before.
    """
    pool = make_pool(num_blocks)
    run = 256
    filled = _fill(pool, num_blocks)
    assert pool.num_cached_free == filled == num_blocks
    samples: list[float] = []
    serial = num_blocks
    for _ in range(repeats):
        ready = []
        for _ in range(per_sample):
            ids = np.arange(serial * BLOCK_SIZE, (serial + run) * BLOCK_SIZE, dtype=np.uint32)
            serial += run
            ready.append((chain_digests(ROOT, ids.tobytes(), BLOCK_SIZE), ids.reshape(-1, BLOCK_SIZE)))
        before = pool.evictions
        with _no_collection():
            begun = time.perf_counter()
            for digests, chunks in ready:
                blocks = pool.allocate(run)
                assert blocks is not None
                pool.publish_chain(blocks, digests, ROOT, chunks, first=True, media=False)
                pool.free(blocks)
            samples.append((time.perf_counter() - begun) / (per_sample * run))
        assert pool.evictions - before == per_sample * run
    assert pool.num_published == num_blocks
    return samples


def _fill(pool: BlockPool, count: int) -> int:
    """Fills `count` free blocks with cached chains of 256; returns how many are cached."""
    serial = 0
    while serial < count:
        run = min(256, count - serial)
        ids = np.arange(serial * BLOCK_SIZE, (serial + run) * BLOCK_SIZE, dtype=np.uint32)
        blocks = pool.allocate(run)
        assert blocks is not None
        digests = chain_digests(ROOT, ids.tobytes(), BLOCK_SIZE)
        pool.publish_chain(blocks, digests, ROOT, ids.reshape(-1, BLOCK_SIZE), first=True, media=False)
        pool.free(blocks)
        serial += run
    return pool.num_cached_free


def bytes_per_block(num_blocks: int) -> float:
    """Resident bytes per block of a pool with every block cached, measured in a process of its own."""
    script = (
        f"import manager_workloads as w; before = w.resident(); pool = w.make_pool({num_blocks}); "
        f"w._fill(pool, {num_blocks}); print((w.resident() - before) / {num_blocks})"
    )
    here = Path(__file__).parent
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=here)
    return float(out.stdout)


def resident() -> int:
    """Bytes of this process in memory now (Linux)."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * next(int(line.split()[1]) for line in rollup if line.startswith("Rss:"))


class _no_collection:
    """The garbage collector off, after a collection."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
