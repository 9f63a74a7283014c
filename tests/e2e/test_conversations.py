"""The next turn of a conversation finds the turn before it, whatever else the manager served meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.calls import Caller, request_for
from support.clients.gate import Gate, standing
from support.clients.stack import ORACLE, Stack, running_stack

from pagekv.v1 import inference_service_pb2 as pb

pytestmark = pytest.mark.e2e


def test_of_two_equal_prompts_at_once_the_longer_answer_is_found_by_its_next_turn() -> None:
    """Both compute the last block of the prompt. The one that ends first leaves its own in the prefix table, others
    take that memory, and the answer that is still generated goes on behind a prefix that must not be lost.
    """
    prompt = list(range(100, 132))

    async def step_by_step(gate: Gate, caller: Caller, request: pb.GenerateRequest) -> None:
        """To the end of the request, and the other one gets hardly more tokens meanwhile."""
        accepted = (await caller.stats()).requests_total
        call = asyncio.create_task(caller.generate(request))
        await caller.stats_when(lambda stats: stats.requests_total > accepted)
        while not call.done():
            await gate.pass_through(1, caller)

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            call = caller.generate(request_for(prompt, 200, ignore_eos=True))
            async with standing(stack.gate, caller, [call]) as (long,):
                await step_by_step(stack.gate, caller, request_for(prompt, 4, ignore_eos=True))
                evicted = (await caller.stats()).evicted_blocks_total
                for base in (3, 4, 5):
                    again = [base + 3 * at for at in range(100)] * 3
                    await step_by_step(stack.gate, caller, request_for(again, 1))
                assert (await caller.stats()).evicted_blocks_total > evicted
                assert not long.done()
            answer = (await long).tokens
            await caller.idle_stats()
            turn = await caller.generate(request_for([*prompt, *answer[:81]], 1))
            assert turn.cached_tokens == 112

    with running_stack(ORACLE, ["--num-device-blocks", "48"], gated=True) as stack:
        asyncio.run(run(stack))
