"""The manager is killed, or stopped in order, in the middle of streams: the client library's callers notice nothing but
a pause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
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


async def _run(target: str) -> tuple[list[Result], tuple[Completion, ...]]:
    """Of the streams, and what a search for beams found."""
    async with AsyncPageKVClient(target) as client:
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
            beams = group.create_task(client.generate_n([6, 7, 8], 2, beam_width=3, max_tokens=40))
            results = [group.create_task(_collect(stream)) for stream in streams]
        return [result for task in results for result in task.result()], beams.result()


def _kill(manager: Process) -> None:
    manager.kill()
    time.sleep(0.1)


def _stop(manager: Process) -> None:
    assert manager.stop() == 0


def _restart_twice(stack: Stack, stop: Callable[[Process], None]) -> None:
    for _ in range(2):
        time.sleep(0.35)
        stop(stack.manager)
        stack.manager.start(stack.manager.port)
        stack.manager.wait_serving()


@pytest.mark.parametrize("stop", [_kill, _stop])
def test_streams_go_on_with_the_same_tokens_and_text(stop: Callable[[Process], None]) -> None:
    with running_stack([*ORACLE, "--step-time-ms", "8"], ["--grace-s", "0.1"]) as stack:
        wanted, wanted_beams = asyncio.run(_run(stack.target))
        killer = threading.Thread(target=_restart_twice, args=(stack, stop))
        killer.start()
        try:
            results, beams = asyncio.run(_run(stack.target))
        finally:
            killer.join()
        with PageKVClient(stack.target) as client:
            assert client.stats().active_blocks == 0
    assert sum(end.resumes for end, _, _ in results) >= len(results)
    assert [(beam.token_ids, beam.text) for beam in beams] == [(beam.token_ids, beam.text) for beam in wanted_beams]
    for (end, ids, text), (wanted_end, wanted_ids, wanted_text) in zip(results, wanted, strict=True):
        assert ids == wanted_ids == list(end.token_ids)
        assert text == wanted_text == end.text
        assert end.logprobs == wanted_end.logprobs
        assert (end.finish_reason, end.stop_string) == (wanted_end.finish_reason, wanted_end.stop_string)
        assert (end.prompt_tokens, end.completion_tokens) == (wanted_end.prompt_tokens, wanted_end.completion_tokens)


def test_any_client_resumes_by_sending_its_request_again() -> None:
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
            for prompt in (as_prompt([4, 5] * 9), as_prompt("And God said"), as_chat(("user", "Who?"))):
                await resume(caller, prompt)

    with running_stack(ORACLE, ["--num-device-blocks", "40"]) as stack:
        asyncio.run(run(stack.target))


def test_a_stack_that_stays_away_is_given_up() -> None:
    with running_stack([*ORACLE, "--step-time-ms", "8"]) as stack, PageKVClient(stack.target) as client:
        stream = client.stream([1, 2, 3], max_tokens=500, ignore_eos=True, resume_timeout=1.0)
        received = [next(stream)]
        stack.manager.kill()
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            received.extend(stream)
        assert 1.0 <= time.monotonic() - begun < 25  # the default is 30
        assert received
