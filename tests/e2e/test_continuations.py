"""`n` continuations of one prompt through real processes: blocks shared, every output its seed's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients.calls import Caller, Result, request_for
from support.clients.gate import standing
from support.clients.stack import CPU, ORACLE, Process, Stack, running_executor, running_manager, running_stack
from support.executor.expected_tokens import expected_tokens

from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROMPT = list(range(100, 200))


def five(prompt: list[int] | str = PROMPT, n: int = 5, max_tokens: int = 20, **sampling: Any) -> pb.GenerateRequest:
    """Continuations drawn with one seed."""
    return request_for(prompt, max_tokens, **{"n": n, "temperature": 1.0, "seed": 11, "ignore_eos": True, **sampling})


async def generate(target: str, *requests: pb.GenerateRequest) -> list[list[Result]]:
    """All at once; results by index."""
    async with Caller(target) as caller:
        found = await asyncio.gather(*(caller.generate_all(request) for request in requests))
        stats = await caller.idle_stats()
        assert stats.free_blocks == stats.num_device_blocks
        return [[results[index] for index in sorted(results)] for results in found]


def test_five_continuations_hold_the_prompt_once() -> None:
    """100 tokens are 6 full blocks for all five; each has a copy of the 7th and blocks of its own."""
    request = five(max_tokens=1000)
    request.request_id = "five"

    async def tables_of(caller: Caller) -> list[list[int]]:
        answer = await caller.operator.GetBlockTable(operator_pb.GetBlockTableRequest(request_id="five"), timeout=120)
        assert [sequence.index for sequence in answer.sequences] == [0, 1, 2, 3, 4]
        return [list(sequence.block_ids) for sequence in answer.sequences]

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            # Past the 28th token, with which the second block of its own begins.
            async with standing(stack.gate, caller, [caller.generate_all(request)], steps=40) as (call,):
                stats, tables = await caller.stats(), await tables_of(caller)
                assert len({tuple(table[:6]) for table in tables}) == 1
                own = [block for table in tables for block in table[6:]]
                assert len(own) == len(set(own)) >= 5 * 2
                assert stats.active_blocks == 6 + len(own)
                call.cancel()
            await caller.idle_stats()

    with running_stack(ORACLE, ["--no-prefix-cache"], gated=True) as stack:
        asyncio.run(run(stack))


MANAGERS = {
    "shared": [],
    "nothing cached": ["--no-prefix-cache"],
    "nothing shared": ["--no-prefix-cache", "--no-fork-sharing"],
    "shared between requests alone": ["--no-fork-sharing"],
    "a small pool": ["--num-device-blocks", "30", "--block-size", "4", "--watermark", "0"],
    "four slots": ["--max-running", "4", "--pipeline-depth", "1"],
    "chunks": ["--max-batch-tokens", "7"],
}


@pytest.fixture(scope="module")
def oracle() -> Iterator[Process]:
    with running_executor(ORACLE) as executor:
        yield executor


@pytest.fixture(scope="module")
def cpu() -> Iterator[Process]:
    with running_executor(CPU) as executor:
        yield executor


@pytest.mark.parametrize("args", MANAGERS.values(), ids=MANAGERS.keys())
def test_every_continuation_is_its_seed_and_index_own(args: list[str], oracle: Process) -> None:
    """A pure function of prompt, seed and index, so also the same for other `n`; index 0 is the request with n = 1."""
    with running_manager(oracle, args) as stack:
        found = asyncio.run(generate(stack.target, five(), five(n=3), five(n=1), five(seed=12)))

        async def info() -> pb.GetModelInfoResponse:
            async with Caller(stack.target) as caller:
                return await caller.inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=120)

        model = asyncio.run(info())
    wanted = [
        [
            expected_tokens(
                PROMPT,
                20,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                ignore_eos=True,
                temperature=1.0,
                seed=seed,
                sequence_index=index,
            )
            for index in range(n)
        ]
        for n, seed in ((5, 11), (3, 11), (1, 11), (5, 12))
    ]
    assert [[result.tokens for result in results] for results in found] == wanted
    assert len({tuple(tokens) for tokens in wanted[0] + wanted[3]}) == 10


def test_continuations_of_a_model_are_the_same_however_much_room_there_is(cpu: Process) -> None:
    """Drawn from the CPU backend's logits; the small pool holds one continuation and a half, so they are preempted."""
    requests = [five("In the beginning God created the heaven", max_tokens=40), five("And God said", seed=3)]
    found = []
    for args in ([], ["--num-device-blocks", "20", "--block-size", "4"], ["--no-fork-sharing"]):
        with running_manager(cpu, args) as stack:
            found.append(asyncio.run(generate(stack.target, *requests)))
    texts = [[[result.text for result in results] for results in run] for run in found]
    assert texts[0] == texts[1] == texts[2]
    assert len({text for results in texts[0] for text in results}) == 10
    assert any(result.complete and result.complete.preemptions for results in found[1] for result in results)


def test_a_stop_string_ends_one_continuation_and_the_others_go_on(cpu: Process) -> None:
    with running_manager(cpu) as stack:
        free = asyncio.run(generate(stack.target, five("And God said", max_tokens=30)))[0]
        # A word that one of them alone comes to, not at its end.
        stop, owner = next(
            (word, index)
            for index, result in enumerate(free)
            for word in result.text.split()[2:8]
            if len(word) > 3 and sum(word in other.text for other in free) == 1
        )
        stopped = asyncio.run(generate(stack.target, five("And God said", max_tokens=30, stop=[stop])))[0]
    for index, (before, after) in enumerate(zip(free, stopped, strict=True)):
        assert after.complete is not None
        if index == owner:
            assert after.complete.finish_reason == types_pb2.FINISH_REASON_STOP
            assert after.complete.stop_string == stop
            assert after.text == before.text[: before.text.index(stop)]
            assert after.tokens == before.tokens[: len(after.tokens)]
            assert len(after.tokens) < len(before.tokens)
        else:
            assert after.complete.finish_reason == types_pb2.FINISH_REASON_LENGTH
            assert after.tokens == before.tokens
