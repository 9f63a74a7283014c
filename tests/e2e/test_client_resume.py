"""The manager is killed, or stopped in order, in the middle of streams: the client library's callers notice nothing but
a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clients.calls import Caller
from support.clients.stack import ORACLE, Process, Stack, running_stack
from support.prompts import as_chat, as_prompt

from pagekv.client import AsyncPageKVClient, AsyncStream, Completion, PageKVClient, Unreachable
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

pytestmark = pytest.mark.e2e

# The oracle's tokens are arbitrary ids of a byte-level vocabulary, so characters are split between tokens all the time.
CHAT = [{"role": "user", "content": "Who made the heavens?"}]
PROMPTS: list[tuple[Any, dict[str, Any]]] = [
    ([1, 2, 3], {"temperature": 0.0}),
    ([4, 5] * 40, {"temperature": 1.0, "seed": 7, "logprobs": 2}),
    ("In the beginning God created", {"temperature": 1.0, "seed": 8}),
    ("ʘ日本語 and a stop string", {"temperature": 1.0, "seed": 9, "stop": ["never seen", "\ufffd" * 4]}),
    (CHAT, {"temperature": 1.0, "seed": 10, "min_tokens": 100}),
]  # fmt: skip  # laid out as a table


Result = tuple[Completion, list[int], str]


async def _collect(stream: AsyncStream) -> list[Result]:
    """The outcome of each sequence."""
    ids, texts = defaultdict[int, list[int]](list), defaultdict[int, str](str)
    async with stream:
        async for chunk in stream:
            ids[chunk.index] += chunk.token_ids
            texts[chunk.index] += chunk.text
    return [(end, ids[index], texts[index]) for index, end in sorted(stream.completions.items())]


async def _run(
    stack: Stack, stop: Callable[[Process], None] | None = None
) -> tuple[list[Result], tuple[Completion, ...]]:
    """Of the streams, and what a search for beams found. `stop` ends the manager twice, in the middle of all of them;
    another one takes its place.
    """
    async with AsyncPageKVClient(stack.target, resume_timeout=600) as client:
        streams = [
            client.stream(prompt, max_tokens=120, ignore_eos=True, **options)
            for prompt, options in PROMPTS
            for _ in range(4)
        ]
        # Several sequences of one request.
        streams += [
            client.stream(prompt, n=3, max_tokens=120, ignore_eos=True, **options) for prompt, options in PROMPTS
        ]
        async with asyncio.TaskGroup() as group:
            with stack.gate.shut():
                beams = group.create_task(client.generate_n([6, 7, 8], 2, beam_width=3, max_tokens=40))
                results = [group.create_task(_collect(stream)) for stream in streams]
                for end in [stop] * 2 if stop else []:
                    async with Caller(stack.target) as caller:
                        await caller.stats_when(lambda stats: stats.requests_total > len(streams))
                        await stack.gate.pass_through(20, caller)
                    await asyncio.to_thread(_replace, stack, end)
        return [result for task in results for result in task.result()], beams.result()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """With little room for a text, so that answers are short where nothing says how long."""
    with running_stack([*ORACLE, "--max-model-len", "256"], ["--grace-s", "0.1"], gated=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> tuple[list[Result], tuple[Completion, ...]]:
    return asyncio.run(_run(stack))


def _stop(manager: Process) -> None:
    assert manager.stop() == 0


def _replace(stack: Stack, stop: Callable[[Process], None]) -> None:
    stop(stack.manager)
    # The two steps that were sent ahead, else the executor would not attach to another manager.
    stack.gate.let_through(2)
    _start(stack)


def _start(stack: Stack) -> None:
    """Another manager in the place of one that has ended."""
    stack.manager.start(stack.manager.port)
    stack.manager.wait_serving()


@pytest.mark.parametrize("stop", [Process.kill, pytest.param(_stop, marks=pytest.mark.long)])
def test_streams_go_on_with_the_same_tokens_and_text(
    stop: Callable[[Process], None], stack: Stack, undisturbed: tuple[list[Result], tuple[Completion, ...]]
) -> None:
    async def idle(target: str) -> None:
        async with Caller(target) as caller:
            await caller.idle_stats()

    wanted, wanted_beams = undisturbed
    results, beams = asyncio.run(_run(stack, stop))
    asyncio.run(idle(stack.target))
    assert all(end.resumes >= 2 for end, _, _ in results)
    assert [(beam.token_ids, beam.text) for beam in beams] == [(beam.token_ids, beam.text) for beam in wanted_beams]
    for (end, ids, text), (wanted_end, wanted_ids, wanted_text) in zip(results, wanted, strict=True):
        assert ids == wanted_ids == list(end.token_ids)
        assert text == wanted_text == end.text
        assert end.logprobs == wanted_end.logprobs
        assert (end.finish_reason, end.stop_string) == (wanted_end.finish_reason, wanted_end.stop_string)
        assert (end.prompt_tokens, end.completion_tokens) == (wanted_end.prompt_tokens, wanted_end.completion_tokens)


@pytest.mark.long
def test_any_client_resumes_by_sending_its_request_again(stack: Stack) -> None:
    """With the token ids it has and nothing else; a conversation keeps its own default of max_tokens."""

    async def resume(caller: Caller, prompt: types_pb2.Prompt) -> None:
        params = types_pb2.SamplingParams(seed=5, ignore_eos=True)
        request = pb.GenerateRequest(prompt=prompt, sampling_params=params)
        whole = await caller.generate(request)
        request.resumed_token_ids.extend(whole.tokens[:7])
        rest = await caller.generate(request)
        assert whole.tokens == [*request.resumed_token_ids, *rest.tokens]
        assert rest.text
        assert whole.text.endswith(rest.text)
        assert whole.complete is not None
        assert rest.complete is not None
        for field in ("prompt_tokens", "completion_tokens", "finish_reason"):
            assert getattr(rest.complete, field) == getattr(whole.complete, field)
        assert list(rest.complete.token_ids) == rest.tokens

    async def run(target: str) -> None:
        async with Caller(target) as caller:
            prompts = (as_prompt([4, 5] * 9), as_prompt("And God said"), as_chat(("user", "Who?")))
            await asyncio.gather(*(resume(caller, prompt) for prompt in prompts))

    asyncio.run(run(stack.target))


@pytest.mark.long
def test_a_stack_that_stays_away_is_given_up(stack: Stack) -> None:
    with PageKVClient(stack.target) as client, stack.gate.shut():
        stack.gate.let_through(4)
        stream = client.stream([1, 2, 3], max_tokens=200, ignore_eos=True, resume_timeout=1.0)
        received = [next(stream)]
        stack.manager.kill()
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            received.extend(stream)
        assert time.monotonic() - begun >= 1.0
        assert received
    _start(stack)
