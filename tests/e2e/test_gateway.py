"""The OpenAI Python client through the gateway `smg` to real processes, as `pagekv up --gateway` starts them."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.clients.gate import Gate
from support.clients.gateway_stack import MODEL, client_of, running_gateway
from support.clients.stack import CPU, ORACLE, ROOT
from support.waiting import wait_until

from pagekv.client import PageKVClient
from pagekv.client.launcher.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.long]
GATED_EXECUTOR = ROOT / "tests" / "support" / "executor" / "gated_executor.py"
# A manager to add.
ROGUE = {"url": "grpc://127.0.0.1:9"}
PROMPT = "In the beginning God created the heaven and the earth, and the earth was without form, and void; and"
MESSAGES: Any = [{"role": "user", "content": "Who art thou?"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The demo model, so that text can be compared with what our own client gets."""
    with running_gateway(CPU) as stack:
        yield stack


@pytest.fixture
def api(stack: Stack) -> Iterator[openai.OpenAI]:
    with client_of(stack) as client:
        yield client


@pytest.fixture
def own(stack: Stack) -> Iterator[PageKVClient]:
    with PageKVClient(stack.target) as client:
        yield client


def test_the_model_is_listed(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list().data] == [MODEL]


def control_status(stack: Stack, path: str, body: Any, **headers: str) -> int:
    """The status with which the gateway answers a request to change it."""
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"http://{stack.gateway_target}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_page_of_another_site_cannot_add_a_manager(stack: Stack) -> None:
    """The gateway itself looks at neither the name that it is asked by nor the origin."""
    page = {"Host": "rebound.example", "Origin": "http://rebound.example"}
    assert control_status(stack, "/workers", ROGUE, **page) == 401


def test_the_key_to_generate_cannot_add_a_manager() -> None:
    gateway_args = ["--api-key", "KEY"]
    with (
        running_gateway([*ORACLE, "--kv-memory", "64MiB"], gateway_args=gateway_args) as stack,
        client_of(stack) as nobody,
    ):
        with pytest.raises(openai.AuthenticationError):
            nobody.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        caller = nobody.with_options(api_key="KEY")
        # Its token may be the end of the text, so the text may be empty.
        answer = caller.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        assert control_status(stack, "/workers", ROGUE, Authorization="Bearer KEY") == 401
        assert control_status(stack, "/flush_cache", {}, Authorization="Bearer KEY") == 401


def test_a_completion_is_what_our_own_client_gets_and_the_second_one_hits_the_cache(
    api: openai.OpenAI, own: PageKVClient
) -> None:
    # Its own beginning, so that no other test has filled the cache with it.
    prompt = f"And it came to pass, that {PROMPT}"
    runs = [api.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0) for _ in range(2)]
    expected = own.generate(prompt, max_tokens=12, temperature=0)
    assert {run.choices[0].text for run in runs} == {expected.text}
    assert runs[0].choices[0].finish_reason == "length"
    for run, hit in zip(runs, (False, True), strict=True):
        assert run.usage is not None
        assert (run.usage.prompt_tokens, run.usage.completion_tokens) == (expected.prompt_tokens, 12)
        assert run.usage.prompt_tokens_details is not None
        # Everything but the last token of the prompt: the last block in part.
        cached = run.usage.prompt_tokens_details.cached_tokens
        assert cached == (expected.prompt_tokens - 1 if hit else 0)


def test_a_chat_is_templated_as_our_own(api: openai.OpenAI, own: PageKVClient) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    expected = own.generate(MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.prompt_tokens


def test_a_stream_brings_the_same_text_in_pieces_and_its_usage(api: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = api.completions.create(**request)
    chunks = list(api.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for chunk in chunks for choice in chunk.choices if choice.text]
    assert "".join(texts) == whole.choices[0].text
    # Two tokens come together where the manager has two steps' results at once.
    assert len(texts) > 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == chunks[-1].usage.prompt_tokens - 1


def test_a_chat_stream_brings_the_same_text(api: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = api.chat.completions.create(**request)
    chunks = list(api.chat.completions.create(**request, stream=True))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


def test_a_seed_draws_what_it_draws_for_our_own_client(api: openai.OpenAI, own: PageKVClient) -> None:
    request: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9}
    expected = own.generate(PROMPT, max_tokens=12, temperature=0.9, seed=7).text
    assert api.completions.create(**request, seed=7).choices[0].text == expected
    assert api.completions.create(**request, seed=8).choices[0].text != expected
    several = api.completions.create(**request, seed=7, n=3)
    assert several.choices[0].text == expected
    assert len({choice.text for choice in several.choices}) == 3


def test_a_stop_string_ends_the_text_before_it(api: openai.OpenAI) -> None:
    text = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0).choices[0].text
    stop = text.split()[3]
    answer = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 20


def test_log_probabilities_of_a_chat(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert len(tokens) == 4
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    # Greedy: the chosen token is the likeliest.
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"max_tokens": 100_000}, r"sampling_params.max_tokens: must be from 1 to \d+"),
        ({"max_tokens": 4, "top_p": 2}, "top_p"),
        ({"max_tokens": 4, "prompt": "word " * 5000}, "maximum context length is 2048"),
        ({"max_tokens": 4, "n": 65}, r"\bn\b"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_says_what(api: openai.OpenAI, request_: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        api.completions.create(**{"model": MODEL, "prompt": PROMPT, **request_})
    assert caught.value.status_code == 400


def test_structured_output_is_refused_and_not_ignored(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="json_schema: must be absent: PageKV constrains no output"):
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4, response_format={"type": "json_object"}
        )


def test_what_the_gateway_itself_leaves_out(api: openai.OpenAI) -> None:
    """The list of docs/deployment.md. Should a later gateway pass one of these on, the list has to lose it."""
    request: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    plain = api.completions.create(**request)
    biased = api.completions.create(**request, logit_bias={"5": 100})
    assert biased.choices[0].text == plain.choices[0].text
    assert api.completions.create(**request, logprobs=2).choices[0].logprobs is None
    # Written behind the output by the gateway; the model does not know of it.
    assert api.completions.create(**request, suffix=" the end").choices[0].text == plain.choices[0].text + " the end"
    with pytest.raises(openai.BadRequestError, match="StringOrArray"):
        api.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4)


def test_another_model_is_a_404(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        api.completions.create(model="nope", prompt=PROMPT, max_tokens=4)


def test_a_connection_that_is_dropped_aborts_the_request_and_frees_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a full queue is a 429, a manager that is gone a 503."""
    limits = ["--max-running", "1", "--max-queue", "1", "--num-device-blocks", "512"]
    gate, command = Gate(tmp_path / "gate"), [sys.executable, str(GATED_EXECUTOR)]
    monkeypatch.setenv("GATE", str(gate.path))
    with (
        running_gateway([*ORACLE, "--kv-memory", "64MiB"], limits, executor_command=command) as stack,
        client_of(stack) as api,
        PageKVClient(stack.target) as own,
    ):
        endless: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}

        def aborted(number: int) -> bool:
            """Whether so many are, one token later: with the next one the gateway notices that its caller is gone."""
            gate.let_through(1)
            return own.stats().aborted_requests_total == number

        with gate.shut():
            gate.let_through(8)
            stream = api.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=1500, extra_body={"ignore_eos": True}, stream=True
            )
            next(iter(stream))
            # One that is not streamed, and whose caller leaves too.
            with posted(stack, endless):
                wait_until(lambda: own.stats().waiting_sequences == 1)
                with pytest.raises(openai.RateLimitError, match="the queue is full: 1 sequences wait, at most 1"):
                    api.completions.create(model=MODEL, prompt="And so", max_tokens=4)
                stream.close()
                wait_until(lambda: aborted(1))
            wait_until(lambda: aborted(2))
        wait_until(lambda: not own.stats().active_blocks)
        stats = own.stats()
        assert (stats.running_sequences, stats.waiting_sequences) == (0, 0)

        manager = stack.children[1].popen
        manager.kill()
        manager.wait()
        with pytest.raises(openai.InternalServerError) as caught:
            api.completions.create(model=MODEL, prompt="And so", max_tokens=4)
        assert caught.value.status_code == 503


@contextmanager
def posted(stack: Stack, request: dict[str, Any]) -> Iterator[None]:
    """A completion that is asked for, by a caller who reads nothing and leaves at the end of the context."""
    host, _, port = stack.gateway_target.rpartition(":")
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield
