"""Three pairs behind the gateway: it routes by what the managers tell of their caches, and outlives one of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import pytest
from support.clients.gateway_stack import MODEL, LoadResult, client_of, indexed_blocks, run_load, running_gateway, words
from support.clients.gateway_stack import shared_prefix_prompts as prompts_of
from support.clients.stack import ORACLE

from pagekv.client import PageKVClient
from pagekv.client.launcher.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.long]
# Steps long enough for streams to be under way when a pair is killed.
EXECUTOR = [*ORACLE, "--kv-memory", "64MiB", "--step-time-ms", "10"]
# 20 prefixes of some 16 blocks fit three pools together and not one.
MANAGER = ["--num-device-blocks", "200"]


@pytest.fixture(scope="module")
def cache_aware() -> Iterator[Stack]:
    with running_gateway(EXECUTOR, MANAGER, replicas=3) as stack:
        yield stack


@pytest.fixture(scope="module")
def round_robin() -> Iterator[Stack]:
    with running_gateway(EXECUTOR, MANAGER, replicas=3, policy="round_robin") as stack:
        yield stack


def test_cache_aware_hits_clearly_more_than_round_robin(cache_aware: Stack, round_robin: Stack) -> None:
    prompts = prompts_of(prefixes=20, prefix_words=240, requests=160)

    def load(stack: Stack, between: Callable[[Stack], None]) -> LoadResult:
        """Four at once, and something to be done before the next four."""
        result = LoadResult()
        for at in range(0, len(prompts), 4):
            four = asyncio.run(run_load(stack, prompts[at : at + 4], concurrency=4))
            result.prompt_tokens += four.prompt_tokens
            result.cached_tokens += four.cached_tokens
            result.lost += four.lost
            between(stack)
        return result

    # Events are some tenths of a second late, in which a fast machine would be done with everything. Through evictions,
    # too, it knows exactly what is there.
    aware = load(cache_aware, _until_indexed)
    blind = load(round_robin, lambda stack: None)
    assert (aware.lost, blind.lost) == ([], [])
    assert aware.hit_rate > blind.hit_rate + 0.15, f"{aware.hit_rate:.1%} and {blind.hit_rate:.1%}"


def test_requests_go_where_the_managers_say_their_prefix_is(cache_aware: Stack) -> None:
    """The prefixes came to the managers past the gateway, which knows of them by events alone."""
    for target in cache_aware.targets:
        with PageKVClient(target) as client:
            client.reset_prefix_cache()
    _until_indexed(cache_aware)
    rng = random.Random(1)
    prefixes = [words(rng, 100) for _ in range(9)]
    for number, prefix in enumerate(prefixes):
        with PageKVClient(cache_aware.targets[number % 3]) as client:
            client.generate(prefix, max_tokens=1)
    _until_indexed(cache_aware)
    with client_of(cache_aware) as api:
        for prefix in prefixes:
            answer = api.completions.create(model=MODEL, prompt=f"{prefix} {words(rng, 8)}", max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 80


def _until_indexed(stack: Stack) -> None:
    """Waits until the gateway knows of as many blocks as there are in the managers' prefix tables."""
    published = 0
    for target in stack.targets:
        with PageKVClient(target) as client:
            published += client.stats().published_blocks
    deadline = time.monotonic() + 120
    while (count := indexed_blocks(stack)) != published:
        assert time.monotonic() < deadline, f"the gateway knows of {count} blocks, the managers of {published}"
        time.sleep(0.05)


# Last: its gateways are left with two pairs.
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_killing_a_pair_loses_no_request_that_the_gateway_can_retry(
    policy: str, request: pytest.FixtureRequest
) -> None:
    """All but the streams that had begun on it: those break with an error, and only their callers could go on."""
    stack: Stack = request.getfixturevalue(policy)
    prompts = prompts_of(prefixes=10, prefix_words=64, requests=120, seed=2)
    result = asyncio.run(run_load(stack, prompts, concurrency=12, max_tokens=20, stream_every=4, kill_after=40))
    assert result.lost == []
    assert result.completed + len(result.broken_streams) == len(prompts)
    # No more than were under way.
    assert len(result.broken_streams) <= 12
    # And it goes on with two.
    after = asyncio.run(run_load(stack, prompts[:20], concurrency=4))
    assert (after.lost, after.broken_streams) == ([], [])
