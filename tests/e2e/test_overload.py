"""Clients that leave, stop reading, run out of time or come all at once: blocks come back, others do not notice, and
the manager's memory stays within its bound (DESIGN 7).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support.clients.calls import Caller, request_for
from support.clients.gate import standing
from support.clients.memory import resident_mib
from support.clients.stack import ORACLE, Process, Stack, running_executor, running_stack

from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.server import Manager

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def read_all(call: Any) -> list[int]:
    """Tokens of a call to its end. Raises what ends it."""
    tokens: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.chunk.token_ids
    return tokens


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
def test_a_request_that_ends_early_gives_its_blocks_back_wherever_it_is(where: str) -> None:
    """It is cancelled, then one like it runs out of time. Another one goes on beside it."""
    # In prefill: 1,900 tokens, 16 a step.
    length = 1900 if where == "prefill" else 20
    ended = request_for([7] * length, 1920 - length, ignore_eos=True)

    counts = (1, 1) if where == "queue" else (2, 0)

    async def enter(stack: Stack, caller: Caller, known: int) -> None:
        """Lets a request into the place that the test is about, once the manager knows of so many."""
        await caller.stats_when(lambda stats: stats.requests_total >= known)
        if where != "queue":
            await stack.gate.pass_through(10 if where == "decode" else 4, caller)

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            call = caller.generate(request_for([5], 1900, ignore_eos=True))
            async with standing(stack.gate, caller, [call], steps=4) as (beside,):
                cancelled = asyncio.create_task(caller.generate(ended))
                await enter(stack, caller, 2)
                stats = await caller.stats()
                assert (stats.running_sequences, stats.waiting_sequences) == counts
                cancelled.cancel()
                await caller.stats_when(lambda stats: stats.aborted_requests_total == 1)

                late = asyncio.create_task(caller.run_out_of_time(ended))
                await enter(stack, caller, 3)
                await late
                stats = await caller.stats_when(lambda stats: stats.aborted_requests_total == stats.requests_total - 1)
                assert not beside.done()
                beside.cancel()
            stats = await caller.idle_stats()
            assert stats.free_blocks == stats.num_device_blocks
            assert stats.aborted_requests_total == stats.requests_total

    args = ["--max-running", "1"] if where == "queue" else ["--max-batch-tokens", "16"]
    with running_stack(ORACLE, [*args, "--no-prefix-cache"], gated=True) as stack:
        asyncio.run(run(stack))


# Seconds for which nobody reads; a minute every night.
SILENCE_S = float(os.environ.get("PAGEKV_TEST_SILENCE_S", "1"))


# The most that one token of a request that runs or waits takes in the manager: prompt ids as Python integers and twice
# as 4 bytes, its share of a block in the prefix table, and its message while it is read.
BYTES_PER_TOKEN = 160
# And each log-probability of it, that of the chosen token included: 9 while it is kept, 50 in the message that waits
# for its reader.
BYTES_PER_LOGPROB = 60
# Interpreter, gRPC's buffers and what the allocator keeps.
SLACK_MIB = 64


def test_readers_that_stop_reading_hold_nobody_up_and_lose_nothing() -> None:
    """Eight calls that nobody reads, with more to say than any buffer of the connection takes; others finish beside
    them, they finish too and give their blocks back, and what they said is all there when it is read at last.
    """
    silent = [request_for([index + 1], 600, ignore_eos=True, logprobs=20) for index in range(8)]

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as reader, Caller(stack.target) as caller:
            calls = [reader.inference.Generate(request) for request in silent]
            others = [request_for([9, index], 50, ignore_eos=True) for index in range(8)]
            results = await caller.generate_many(others)
            assert [len(result.tokens) for result in results] == [50] * 8
            # Nobody has read a message yet, and nothing runs any more.
            await caller.stats_when(lambda stats: stats.requests_total == len(calls) + len(others))
            stats = await caller.idle_stats()
            assert stats.free_blocks == stats.num_device_blocks
            assert stats.generated_tokens_total == 8 * 600 + 8 * 50
            deadline = time.monotonic() + SILENCE_S
            while time.monotonic() < deadline:
                assert [r.tokens for r in await caller.generate_many(others)] == [r.tokens for r in results]
            found = list[list[int]]()
            for call in calls:
                tokens, logprobs = list[int](), 0
                async for message in call:
                    tokens += message.chunk.token_ids
                    logprobs += len(message.chunk.logprobs)
                assert logprobs == 600
                found.append(tokens)
            # The same without log-probabilities.
            again = [request_for([index + 1], 600, ignore_eos=True) for index in range(8)]
            assert found == [result.tokens for result in await caller.generate_many(again)]

    with running_stack(ORACLE) as stack:
        asyncio.run(run(stack))


def test_silent_readers_take_no_more_memory_than_their_tokens_and_log_probabilities_may() -> None:
    """16 calls of 1,900 tokens with 20 log-probabilities each, unread until all have ended. The size of one
    kept position is in `tests/unit/kvmanager/request/test_logprobs.py`.
    """
    calls, length, logprobs = 16, 1900, 20

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            requests = [request_for([index + 1], length, ignore_eos=True, logprobs=logprobs) for index in range(calls)]
            silent = [caller.inference.Generate(request) for request in requests]
            await caller.stats_when(lambda stats: stats.requests_total == calls)
            await caller.idle_stats(240)
            for call in silent:
                assert len(await read_all(call)) == length

    with running_stack(ORACLE) as stack:
        before = resident_mib(stack.manager.pid, "VmRSS")
        asyncio.run(run(stack))
        peak = resident_mib(stack.manager.pid, "VmHWM")
    bound = before + calls * length * (BYTES_PER_TOKEN + BYTES_PER_LOGPROB * (logprobs + 1)) / 2**20 + SLACK_MIB
    print(f"{before:.0f} MiB before, {peak:.0f} at most, bound {bound:.0f}")
    assert peak < bound


# A connection of its own, on which the server may send little ahead of what is read.
SMALL_WINDOW = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 4096),
    ("grpc.http2.bdp_probe", 0),
)


@asynccontextmanager
async def manager_here(executor: Process, **engine: int) -> AsyncIterator[str]:
    """The address of a manager in this process, which can be told what no flag says."""
    config = parse_config(["--listen", "127.0.0.1:0", "--executor", executor.target, "--tokenizer", "none"], {})
    manager = Manager(replace(config, engine=replace(config.engine, **engine)), None)  # type: ignore[arg-type]  # by name
    stop = asyncio.Event()
    serving = asyncio.create_task(manager.run(stop))
    await manager.engine.wait_ready()
    yield f"127.0.0.1:{manager._grpc.port}"
    stop.set()
    assert await serving == 0


def test_answers_that_nobody_reads_are_bounded() -> None:
    """Once `max_unread` of them wait, the next request is refused, until one of them is read or its caller goes."""

    async def run(executor: Process) -> None:
        async with (
            manager_here(executor, max_unread=6) as target,
            Caller(target, SMALL_WINDOW) as silent,
            Caller(target) as caller,
        ):
            requests = [request_for([9, index], 600, ignore_eos=True, logprobs=20) for index in range(6)]
            calls = [silent.inference.Generate(request) for request in requests]
            await caller.stats_when(lambda stats: stats.unread_sequences == 6)
            for end_one in (lambda: read_all(calls[0]), lambda: asyncio.to_thread(calls[1].cancel)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await caller.generate(request_for([9], 4))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "6 sequences have ended that their clients have not read, at most 6" in str(caught.value)
                await end_one()
                await caller.stats_when(lambda stats: stats.unread_sequences == 5)
                calls.append(silent.inference.Generate(requests[0]))
                await caller.stats_when(lambda stats: stats.unread_sequences == 6)
            assert (await caller.stats()).rejected_requests_total == 2

    with running_executor(ORACLE) as executor:
        asyncio.run(run(executor))


def test_a_flood_takes_no_more_memory_than_the_queue_bounds() -> None:
    """The bound: (--max-queue + --max-running) sequences of --max-model-len tokens. Refused calls leave nothing."""
    queue, running, length = 64, 8, 4000

    async def flood(stack: Stack) -> int:
        async with Caller(stack.target) as caller:
            prompts = [[1 + index, *(token % 500 for token in range(length - 3))] for index in range(400)]
            before = await caller.stats()
            answered = before.requests_total + before.rejected_requests_total + len(prompts)
            with stack.gate.shut():
                requests = [request_for(prompt, 2, ignore_eos=True) for prompt in prompts]
                calls = [asyncio.create_task(caller.generate(request)) for request in requests]
                await caller.stats_when(lambda stats: stats.requests_total + stats.rejected_requests_total == answered)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await caller.idle_stats()
        refused = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
        assert {error.code() for error in refused} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
        return len(refused)

    args = ["--max-queue", str(queue), "--max-running", str(running), "--max-batch-tokens", "8192"]
    # A context of its own: that of the demo model is short.
    oracle = ["--backend", "oracle", "--model", "", "--max-model-len", str(length)]
    with running_stack(oracle, [*args, "--num-device-blocks", "4096"], gated=True) as stack:
        before = resident_mib(stack.manager.pid, "VmRSS")
        refused = [asyncio.run(flood(stack)) for _ in range(3)]
        peak = resident_mib(stack.manager.pid, "VmHWM")
    assert min(refused) >= 400 - queue - running
    bound = before + (queue + running) * length * BYTES_PER_TOKEN / 2**20 + SLACK_MIB
    print(f"{before:.0f} MiB before, {peak:.0f} at most, bound {bound:.0f}; refused {refused} of 400")
    assert peak < bound
