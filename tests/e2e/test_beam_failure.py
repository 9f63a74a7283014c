"""Beam searches that are aborted, left alone, or whose executor is killed: every block comes back, and what goes on
finds what it would have found.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from support.clients.calls import Caller, Result, request_for
from support.clients.gate import at_once, standing
from support.clients.stack import Process, Stack, running_manager
from support.executor.wire_driver import expected_output, expected_results

from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def search(number: int, max_tokens: int, width: int = 4, n: int = 4, **sampling: Any) -> pb.GenerateRequest:
    """A search over a prompt of its own, which shares its beginning with all others."""
    prompt = [*range(1, 40), 50 + number]
    return request_for(prompt, max_tokens, beam_width=width, n=n, ignore_eos=True, **sampling)


class Oracle:
    """The answers that requests must bring over the oracle that a stack serves."""

    def __init__(self, info: pb.GetModelInfoResponse) -> None:
        self._vocab, self._eos = info.vocab_size, tuple(info.eos_token_ids)

    def wanted(self, request: pb.GenerateRequest) -> list[list[int]]:
        """Tokens of every output, by index."""
        params = request.sampling_params
        sampling = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            seed=params.seed,
            ignore_eos=params.ignore_eos,
            stop_token_ids=tuple(params.stop_token_ids),
            beam_width=params.beam_width,
            length_penalty=params.length_penalty if params.HasField("length_penalty") else 1.0,
            early_stopping=params.early_stopping,
        )
        n = params.n if params.HasField("n") else 1
        command = GenerateCommand("", list(request.prompt.token_ids.ids), sampling, n=n)
        if sampling.beam_width:
            return expected_results(command, self._vocab, self._eos)
        return [expected_output(command, index, self._vocab, self._eos) for index in range(n)]


async def oracle_of(caller: Caller) -> Oracle:
    return Oracle(await caller.inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=120))


def outputs(results: dict[int, Result]) -> list[list[int]]:
    """Of beam search, whose tokens come with the end."""
    complete = [results[index].complete for index in sorted(results)]
    return [list(end.token_ids) for end in complete if end is not None]


def test_searches_survive_a_killed_executor(executor: Process) -> None:
    requests = [search(number, 80) for number in range(3)] + [search(3, 80, width=2, n=1)]

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            oracle = await oracle_of(caller)
            wanted = [oracle.wanted(request) for request in requests]
            calls = [caller.generate_all(request) for request in requests]
            async with standing(stack.gate, caller, calls, steps=20) as going:
                assert (await caller.stats()).running_sequences == 14
                await asyncio.to_thread(stack.executor.kill)
                await asyncio.to_thread(stack.executor.start, stack.executor.port)
            assert [outputs(await results) for results in going] == wanted
            stats = await caller.idle_stats()
            assert stats.executor_restarts_total == 1
            assert stats.free_blocks == stats.num_device_blocks
            # Again, from what is cached by now.
            again = await asyncio.gather(*(caller.generate_all(request) for request in requests))
            assert [outputs(results) for results in again] == wanted

    with running_manager(executor, ["--block-size", "4"]) as stack:
        asyncio.run(run(stack))


@pytest.mark.parametrize("how", ["abort", "cancel", "deadline"])
def test_a_search_that_ends_early_gives_every_block_back(how: str, executor: Process) -> None:
    """Another one beside it does not notice."""
    ended, other = search(1, 2000, n=3), search(2, 60)
    ended.request_id = "ended"

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            async with standing(stack.gate, caller, [caller.generate_all(other)]) as (beside,):
                if how == "deadline":
                    late = asyncio.create_task(caller.run_out_of_time(ended))
                else:
                    call = caller.inference.Generate(ended)
                await caller.stats_when(lambda stats: stats.requests_total > 1)
                await stack.gate.pass_through(10, caller)
                if how == "abort":
                    answer = await caller.inference.Abort(pb.AbortRequest(request_ids=["ended"]), timeout=120)
                    assert list(answer.aborted_request_ids) == ["ended"]
                    ends = [message.complete async for message in call]
                    assert [end.index for end in ends] == [0, 1, 2]
                    assert {end.finish_reason for end in ends} == {types_pb2.FINISH_REASON_ABORT}
                    assert not any(end.token_ids for end in ends)
                elif how == "cancel":
                    call.cancel()
                else:
                    await late
            assert outputs(await beside) == (await oracle_of(caller)).wanted(other)
            stats = await caller.idle_stats()
            assert stats.free_blocks == stats.num_device_blocks
            assert stats.aborted_requests_total == stats.requests_total - 1

    with running_manager(executor) as stack:
        asyncio.run(run(stack))


def test_the_blocks_of_a_search_are_shown_while_it_runs(executor: Process) -> None:
    """GetBlockTable: beams hold the prompt's full blocks together and the block they write alone."""
    request = search(1, 2000)
    request.request_id = "shown"

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            async with standing(stack.gate, caller, [caller.generate_all(request)], steps=3) as (call,):
                table = await caller.operator.GetBlockTable(
                    operator_pb.GetBlockTableRequest(request_id="shown"), timeout=120
                )
                tables = [list(sequence.block_ids) for sequence in table.sequences]
                assert len(tables) == 4
                # 40 tokens of prompt are two full blocks and a half.
                assert len({tuple(blocks[:2]) for blocks in tables}) == 1
                assert len({blocks[-1] for blocks in tables}) == 4
                call.cancel()
            await caller.idle_stats()

    with running_manager(executor) as stack:
        asyncio.run(run(stack))


def test_forty_searches_and_samples_in_a_small_pool_find_what_each_finds_alone(executor: Process) -> None:
    rng = random.Random(5)
    requests = []
    for number in range(40):
        prompt = [*range(1, rng.randint(2, 60)), *(rng.randrange(1, 3000) for _ in range(rng.randint(0, 20)))]
        common: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "priority": rng.choice([0, 0, 1])}
        if number % 2:
            width = rng.choice([1, 2, 4])
            common |= {"beam_width": width, "n": rng.randint(1, width), "length_penalty": rng.choice([0.0, 1.0])}
            common |= {"early_stopping": rng.random() < 0.3, "stop_token_ids": [7] * rng.randint(0, 1)}
        else:
            common |= {"temperature": 1.0, "seed": number, "n": rng.choice([1, 3, 5])}
        priority = common.pop("priority")
        requests.append(request_for(prompt, **common))
        requests[-1].priority = priority

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            oracle = await oracle_of(caller)
            found = await at_once(stack.gate, caller, [caller.generate_all(request) for request in requests])
            for request, results in zip(requests, found, strict=True):
                assert outputs(results) == oracle.wanted(request), request
            stats = await caller.idle_stats()
            assert stats.free_blocks == stats.num_device_blocks
            assert stats.preemptions_total > 0
            assert stats.executor_restarts_total == 0

    # The blocks that four beams of the longest may come to need.
    args = ["--block-size", "4", "--num-device-blocks", "104", "--max-batch-tokens", "64", "--max-running", "24"]
    with running_manager(executor, args) as stack:
        asyncio.run(run(stack))
