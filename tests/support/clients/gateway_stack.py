"""Pairs of executor and manager behind the gateway, as `pagekv up --replicas` starts them, and a load for them."""

from __future__ import annotations

import asyncio
import random
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from pagekv.client.launcher.gateway import POLICIES, GatewayConfig
from pagekv.client.launcher.stack import EXECUTOR_COMMAND, Stack, StackConfig

MODEL = "demo"
# About one token each in the demo model's vocabulary.
_WORDS = (
    "the king lord and earth heaven people children days house land water fire stone city father mother son daughter "
    "sea night light day man woman tree bread wine oil gold silver brass iron"
)
WORDS = tuple(_WORDS.split())


@contextmanager
def running_gateway(
    executor_args: Sequence[str],
    manager_args: Sequence[str] = (),
    *,
    replicas: int = 1,
    policy: str = POLICIES[0],
    gateway_args: Sequence[str] = (),
    executor_command: Sequence[str] = EXECUTOR_COMMAND,
) -> Iterator[Stack]:
    """All of it, ready; stopped at the end. `executor_command`: another one than the package's executor."""
    config = StackConfig(
        port=0,
        replicas=replicas,
        gateway=GatewayConfig(port=0, policy=policy, args=gateway_args),
        executor_args=executor_args,
        manager_args=["--gateway-api", *manager_args],
        executor_command=executor_command,
    )
    with Stack(config) as stack:
        stack.start()
        assert stack.wait_ready(600)
        yield stack


def client_of(stack: Stack) -> openai.OpenAI:
    """OpenAI's client, which retries nothing by itself here."""
    return openai.OpenAI(base_url=f"http://{stack.gateway_target}/v1", api_key="none", max_retries=0, timeout=240)


def indexed_blocks(stack: Stack) -> int:
    """Blocks of all managers that the gateway knows of."""
    with urllib.request.urlopen(f"http://{stack.gateway_metrics_target}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("smg_kv_index_blocks{"))


def words(rng: random.Random, count: int) -> str:
    """Text that no other call gives."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def shared_prefix_prompts(prefixes: int, prefix_words: int, requests: int, seed: int = 0) -> list[str]:
    """Prompts that each begin with one of a few long texts, in random order, and end with a short one of their own."""
    rng = random.Random(seed)
    shared = [words(rng, prefix_words) for _ in range(prefixes)]
    return [f"{rng.choice(shared)} {words(rng, 16)}" for _ in range(requests)]


@dataclass
class LoadResult:
    """The result of a load. Tokens are those of the prompts, from the answers' `usage`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completed: int = 0
    # Errors of requests that got no answer at all.
    lost: list[str] = field(default_factory=list)
    # Errors of streams that broke after their first piece, which only the caller can retry.
    broken_streams: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


async def run_load(
    stack: Stack,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int = 4,
    stream_every: int = 0,
    kill_after: int = 0,
) -> LoadResult:
    """Sends the prompts, so many at once. `stream_every`: one in so many is a stream. Once `kill_after` are answered
    (0: never) the last pair is killed.
    """
    result, slots = LoadResult(), asyncio.Semaphore(concurrency)

    async def send(api: openai.AsyncOpenAI, number: int, prompt: str) -> None:
        request: Any = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
        begun = False
        async with slots:
            try:
                if stream_every and number % stream_every == 0:
                    request["stream_options"] = {"include_usage": True}
                    async for chunk in await api.completions.create(**request, stream=True):
                        begun, usage = True, chunk.usage
                else:
                    usage = (await api.completions.create(**request)).usage
                assert usage is not None, "a stream ended without its usage"
                assert usage.completion_tokens == max_tokens
                assert usage.prompt_tokens_details is not None
                result.prompt_tokens += usage.prompt_tokens
                result.cached_tokens += usage.prompt_tokens_details.cached_tokens or 0
                result.completed += 1
            except (openai.APIError, AssertionError) as error:
                (result.broken_streams if begun else result.lost).append(f"request {number}: {error}")
        if kill_after and result.completed == kill_after:
            kill_last_pair(stack)

    async with openai.AsyncOpenAI(
        base_url=f"http://{stack.gateway_target}/v1", api_key="none", max_retries=0, timeout=240
    ) as api:
        await asyncio.gather(*(send(api, number, prompt) for number, prompt in enumerate(prompts)))
    return result


def kill_last_pair(stack: Stack) -> None:
    """SIGKILL for a manager and its executor at once."""
    last = len(stack.targets)
    for child in stack.children:
        if child.name in (f"manager {last}", f"executor {last}"):
            child.popen.kill()
