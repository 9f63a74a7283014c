"""Many streams at once through real processes: outputs as one at a time, and every block back at the end."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.clients.calls import Caller, request_for
from support.clients.gate import at_once
from support.clients.stack import ORACLE, Stack, running_executor, running_manager

from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

pytestmark = pytest.mark.e2e

VOCAB = 3000  # below the demo model's vocabulary


def prompts(seed: int, count: int, low: int, high: int, prefix: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(1, VOCAB) for _ in range(prefix)]
    return [[*common, *(rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high)))] for _ in range(count)]


async def one_at_a_time(caller: Caller, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    return [(await caller.generate(request)).tokens for request in requests]


@pytest.mark.parametrize("backend", ["oracle", pytest.param("cpu", marks=pytest.mark.long)])
def test_64_concurrent_calls_equal_one_at_a_time(backend: str, request: pytest.FixtureRequest) -> None:
    stack: Stack = request.getfixturevalue(f"{backend}_stack")
    # A real model is slow: its prompts are shorter, and every fourth of its calls is repeated alone.
    longest, step = (300, 1) if backend == "oracle" else (100, 4)

    async def run() -> None:
        async with Caller(stack.target) as caller:
            before = (await caller.idle_stats()).free_blocks
            requests = [
                request_for(prompt, max_tokens=4 + index % 29, ignore_eos=True, temperature=index % 2, seed=index)
                for index, prompt in enumerate(prompts(1, 64, 1, longest))
            ]
            together = [result.tokens for result in await caller.generate_many(requests)]
            assert (await caller.idle_stats()).free_blocks == before
            assert together[::step] == await one_at_a_time(caller, requests[::step])
            assert all(len(tokens) == 4 + index % 29 for index, tokens in enumerate(together))

    asyncio.run(run())


def test_32_at_once_compute_a_shared_prefix_once() -> None:
    """One computes the 512-token prefix, 31 report it cached, and the executor's own count agrees."""
    shared = prompts(2, 32, 32, 32, prefix=512)
    requests = [request_for(prompt, max_tokens=8, ignore_eos=True) for prompt in shared]

    async def run(target: str) -> tuple[list[list[int]], list[int], int]:
        async with Caller(target) as caller:
            results = await caller.generate_many(requests)
            computed = (await caller.idle_stats()).computed_tokens_total
            return [r.tokens for r in results], [r.cached_tokens for r in results], computed

    async def cold(target: str) -> list[list[int]]:
        async with Caller(target) as caller:
            return await one_at_a_time(caller, requests)

    with running_executor(ORACLE) as process:
        with running_manager(process) as stack:
            together, cached, computed = asyncio.run(run(stack.target))
        with running_manager(process, ["--no-prefix-cache"]) as stack:
            assert together == asyncio.run(cold(stack.target))
    assert sorted(cached) == [0] + [512] * 31
    # Every prompt once, less what was cached, and seven of the eight generated tokens (the last is never computed).
    assert computed == 512 + 32 * 32 + 32 * 7


def test_a_third_of_the_memory_finishes_every_request_unchanged() -> None:
    """A model's own blocks come back too: tests/model/test_preemption_cpu.py."""
    many = prompts(3, 24, 20, 200)
    requests = [request_for(prompt, max_tokens=40, ignore_eos=True) for prompt in many]
    # All of them together would hold this many blocks at their ends.
    need = sum(-(-(len(prompt) + 39) // 16) for prompt in many)

    async def run(stack: Stack) -> tuple[list[list[int]], operator_pb.GetStatsResponse]:
        async with Caller(stack.target) as caller:
            results = await at_once(stack.gate, caller, [caller.generate(request) for request in requests])
            return [r.tokens for r in results], await caller.idle_stats()

    small = ["--num-device-blocks", str(need // 3), "--watermark", "0"]
    with running_executor(ORACLE, gated=True) as process:
        with running_manager(process, ["--num-device-blocks", str(need * 2)]) as stack:
            wanted, stats = asyncio.run(run(stack))
            assert stats.preemptions_total == 0
        for mode in ("recompute", "swap", "auto"):
            with running_manager(process, [*small, "--preemption", mode, "--write-back"]) as stack:
                outputs, stats = asyncio.run(run(stack))
            assert outputs == wanted
            assert stats.preemptions_total > 0
            assert stats.host_held_blocks == 0
            if mode == "recompute":
                assert stats.swapped_out_blocks_total == 0
            if mode == "swap":
                assert stats.swap_preemptions_total > 0
                assert stats.swapped_in_blocks_total > 0


def test_1000_random_cancels_leak_nothing(oracle_stack: Stack) -> None:
    rng = random.Random(4)

    async def cancel_one(caller: Caller, number: int) -> None:
        request = request_for([rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 400))], max_tokens=200)
        call = caller.inference.Generate(request)
        try:
            for _ in range(rng.randint(0, 5)):
                await asyncio.wait_for(call.read(), rng.choice([0.001, 0.01, 60.0]))
        except TimeoutError:
            pass
        call.cancel()

    async def run() -> None:
        async with Caller(oracle_stack.target) as caller:
            before = await caller.idle_stats()
            for start in range(0, 1000, 50):
                await asyncio.gather(*(cancel_one(caller, start + i) for i in range(50)))
            after = await caller.idle_stats()
            assert after.free_blocks == before.free_blocks
            assert after.requests_total > before.requests_total
            # And it still serves.
            assert len((await caller.generate(request_for([1, 2, 3], 5, ignore_eos=True))).tokens) == 5

    asyncio.run(run())
