"""A context of a million tokens through both processes, each of its slots judged by the oracle."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.clients.calls import Caller, request_for
from support.clients.stack import running_stack
from support.executor.expected_tokens import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LENGTH = 1_000_000
VOCAB = 150_000


def test_a_prompt_of_a_million_tokens_is_answered_and_its_next_turn_finds_it_cached() -> None:
    """Another stream goes on beside it."""
    chance = random.Random(1)
    prompt = [chance.randrange(1, VOCAB) for _ in range(LENGTH)]

    async def main(target: str) -> None:
        async with Caller(target) as caller:
            beside = asyncio.create_task(caller.generate(request_for([7, 8, 9], 500, ignore_eos=True)))
            first = await caller.generate(request_for(prompt, 20, ignore_eos=True))
            assert first.tokens == expected_tokens(prompt, 20, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)
            assert first.complete is not None
            assert first.complete.cached_tokens == 0
            turn = [*prompt, *first.tokens, *range(1, 100)]
            second = await caller.generate(request_for(turn, 3, ignore_eos=True))
            assert second.tokens == expected_tokens(turn, 3, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)
            # The last token of the first answer was never computed.
            assert second.complete is not None
            assert second.complete.cached_tokens == (LENGTH + 19) // 16 * 16
            assert len((await beside).tokens) == 500
            stats = await caller.idle_stats()
            assert stats.hash_alarms_total == 0
            assert stats.executor_restarts_total == 0
            assert stats.published_blocks >= (LENGTH + 100) // 16

    oracle = ["--backend", "oracle", "--vocab-size", str(VOCAB), "--max-model-len", str(LENGTH + 10_000)]
    oracle += ["--kv-memory", "64MiB"]
    with running_stack(oracle, ["--max-batch-tokens", "16384", "--no-partial-hits"]) as stack:
        asyncio.run(main(stack.target))
