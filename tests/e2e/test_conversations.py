"""The next turn of a conversation finds the turn before it, whatever else the manager served meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.calls import Caller, request_for
from support.clients.stack import ORACLE, Stack, running_stack

pytestmark = pytest.mark.e2e


def test_of_two_equal_prompts_at_once_the_longer_answer_is_found_by_its_next_turn() -> None:
    """Both compute the last block of the prompt. The one that ends first leaves its own in the prefix table, others
    take that memory, and the answer that is still generated goes on behind a prefix that must not be lost.
    """
    prompt = list(range(100, 132))

    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller:
            long = caller.inference.Generate(request_for(prompt, 400, ignore_eos=True))
            await caller.generate(request_for(prompt, 4, ignore_eos=True))
            evicted = (await caller.stats()).evicted_blocks_total
            for base in (3, 4, 5):
                await caller.generate(request_for([base + 3 * at for at in range(100)] * 3, 1))
            assert (await caller.stats()).evicted_blocks_total > evicted
            answer: list[int] = []
            async for response in long:
                answer += response.chunk.token_ids
                if len(answer) >= 81:
                    break
            long.cancel()
            await caller.idle_stats()
            turn = await caller.generate(request_for([*prompt, *answer[:81]], 1))
            assert turn.cached_tokens == 112

    with running_stack([*ORACLE, "--step-time-ms", "5"], ["--num-device-blocks", "48"]) as stack:
        asyncio.run(run(stack))
