"""Prompts: what a deployment without tokenizer or template refuses, and where long ones are read."""

from __future__ import annotations

import asyncio
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from support.engine import small_tokenizers
from support.engine.fake_engine import MODEL
from support.engine.generate_requests import (
    NO_TEMPLATE,
    TOKENIZER,
    chat,
    ids,
    read,
    sampled,
)
from support.event_loop import counted_turns, until
from support.prompts import as_prompt

from pagekv.common.errors import InvalidRequest, Overloaded
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.identity import Identity
from pagekv.kvmanager.api import prompt_reader
from pagekv.kvmanager.api.prompt_reader import (
    INLINE_CHARACTERS,
    INLINE_IDS,
    MAX_CHAT_MESSAGES,
    MESSAGES_AT_ONCE,
    THREAD_CHARACTERS,
    THREAD_IDS,
    PromptReader,
    decode,
)
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.api.validation import read_generate
from pagekv.kvmanager.text.chat_template import ChatTemplate
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.kvmanager.text.waiting_jobs import WaitingJobs
from pagekv.v1 import inference_service_pb2 as pb


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(prompt=as_prompt("x")), "prompt.text"),
        (chat(("user", "x")), "prompt.chat"),
        (sampled(stop=["x"]), "sampling_params.stop"),
    ],
)
def test_without_a_tokenizer_only_token_ids_are_taken(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        read(request_, None)
    assert caught.value.field == field
    assert list(read(ids(5, 6), None)[0].prompt_ids) == [5, 6]


def test_without_a_chat_template_chat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        read(chat(("user", "x")), NO_TEMPLATE)
    assert caught.value.field == "prompt.chat"


def test_a_tokenizer_with_more_ids_than_the_model_is_caught() -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 2 "):
        asyncio.run(
            read_generate(
                pb.GenerateRequest(prompt=as_prompt("x")), Served(replace(MODEL, vocab_size=3), TOKENIZER), ""
            )
        )


@pytest.mark.parametrize(
    ("characters", "where"),
    [
        (INLINE_CHARACTERS, "here"),
        (INLINE_CHARACTERS + 1, "thread"),
        (THREAD_CHARACTERS, "thread"),
        (THREAD_CHARACTERS + 1, "process"),
    ],
)
def test_long_texts_do_not_hold_up_the_event_loop(characters: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def encode(tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
        seen.append("here" if threading.current_thread() is threading.main_thread() else "thread")
        return [5]

    async def encode_long(tokenizer: Tokenizer, text: str, **how: Any) -> array[int]:
        seen.append("process")
        return array("I", [5])

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_long", encode_long)
    request = pb.GenerateRequest(prompt=as_prompt("x" * characters))
    assert list(read(request, max_model_len=2**20)[0].prompt_ids) == [5]
    assert seen == [where]


@pytest.mark.parametrize("characters", [1, INLINE_CHARACTERS + 1, THREAD_CHARACTERS + 1])
def test_a_text_that_the_tokenizer_refuses_is_refused_in_its_words(characters: int) -> None:
    """Wherever it is encoded; the process of long texts goes on."""
    tokenizer = Tokenizer(small_tokenizers.without_unknown())
    reader = PromptReader(tokenizer, 100, 2**20, "a limit")

    async def main() -> None:
        assert len(await reader.text("text", "a" * (THREAD_CHARACTERS + 1))) == THREAD_CHARACTERS + 1
        (process,) = tokenizer._worker._processes
        with pytest.raises(InvalidRequest, match="can encode: Encountered an unknown token"):
            await reader.text("text", "c" * characters)
        assert tokenizer._worker._processes == [process]
        assert process.poll() is None

    asyncio.run(main())
    tokenizer.close()


@pytest.mark.parametrize("count", [1, INLINE_IDS + 1, THREAD_IDS + 1])
def test_ids_on_which_the_library_panics_are_refused(count: int) -> None:
    """A space of which the decoder strips one space at either end."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({" ": 0, "?": 1}, unk_token="?"))
    backend.decoder = tokenizers.decoders.Strip(" ", 1, 1)
    tokenizer = Tokenizer(backend)
    with pytest.raises(InvalidRequest, match="must be ids that the tokenizer can decode: "):
        asyncio.run(decode(tokenizer, array("I", [0] * count)))
    tokenizer.close()


@pytest.mark.parametrize("count", [INLINE_IDS, INLINE_IDS + 1, THREAD_IDS, THREAD_IDS + 1])
def test_ids_become_the_same_text_wherever_they_are_decoded(count: int) -> None:
    token_ids = array("I", [3 + n % 390 for n in range(count)])
    assert asyncio.run(decode(TOKENIZER, token_ids)).decode() == TOKENIZER.decode(token_ids)


def test_the_event_loop_turns_while_a_long_conversation_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    made: Callable[[], int] = int

    async def render(template: ChatTemplate, messages: Sequence[dict[str, str]]) -> str:
        nonlocal seen
        assert messages == [{"role": "user", "content": f"ü{n}"} for n in range(MAX_CHAT_MESSAGES)]
        seen = made()
        return "x"

    async def main() -> None:
        nonlocal made
        async with counted_turns() as made:
            await asyncio.sleep(0)
            request = chat(*(("user", f"ü{n}") for n in range(MAX_CHAT_MESSAGES)))
            await read_generate(request, Served(replace(MODEL, max_model_len=2**20), TOKENIZER), "")

    monkeypatch.setattr(ChatTemplate, "render", render)
    asyncio.run(main())
    assert seen >= MAX_CHAT_MESSAGES // MESSAGES_AT_ONCE - 1


def test_long_texts_that_their_callers_gave_up_delay_nobody() -> None:
    """Of six texts of 4 MB, one is being encoded and the others wait when all are given up; then one is read whole."""
    tokenizer = Tokenizer(small_tokenizers.byte_level())
    reader = PromptReader(tokenizer, 400, 2**23, "a test")
    huge, long = "ab c" * 10**6, "the earth " * 10_000

    async def main() -> None:
        first = await reader.text("text", long)
        (process,) = tokenizer._worker._processes
        given_up = [asyncio.create_task(reader.text("text", huge)) for _ in range(6)]
        while tokenizer._worker._current is None:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert all(task.cancelled() for task in given_up)
        assert process.wait() == -signal.SIGKILL
        assert await reader.text("text", long) == first

    asyncio.run(main())
    tokenizer.close()


def test_huge_lists_of_ids_are_refused_by_their_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        raise AssertionError("no id needs to be looked at")

    monkeypatch.setattr("pagekv.kvmanager.api.prompt_reader.check_token_ids", look)
    with pytest.raises(InvalidRequest, match="has 2000000 tokens"):
        read(ids(*[2**32 - 1] * 2_000_000))


class Slow(Tokenizer):
    """Encodes and decodes once an event is set."""

    def __init__(self, held: threading.Event) -> None:
        super().__init__(small_tokenizers.byte_level())
        self._until = held

    def encode(self, text: str, *, special_tokens: bool, limit: int) -> list[int]:
        self._until.wait()
        return [1]

    def decode(self, token_ids: Sequence[int]) -> str:
        self._until.wait()
        return "x"


@pytest.mark.parametrize("text", ["x" * (INLINE_CHARACTERS + 1), ""])
def test_texts_of_one_tenant_in_the_threads_stand_before_few_of_another(text: str) -> None:
    """Two are at work and two wait, however many more there are. Empty text: ids are decoded instead."""
    held, done = threading.Event(), list[str]()

    tokenizer = Slow(held)
    reader = PromptReader(tokenizer, 100, 100_000, "a limit")

    async def call(tenant: str) -> None:
        caller.set(Identity(tenant, frozenset()))
        await (reader.text("text", text) if text else decode(tokenizer, array("I", [1] * (INLINE_IDS + 1))))
        done.append(tenant)

    async def main() -> None:
        flood = [asyncio.create_task(call("flood")) for _ in range(20)]
        await asyncio.sleep(0.01)
        quiet = asyncio.create_task(call("quiet"))
        await asyncio.sleep(0.01)
        held.set()
        await asyncio.gather(quiet, *flood)

    asyncio.run(main())
    assert done.index("quiet") <= 4
    tokenizer.close()


@pytest.mark.parametrize("text", ["x" * (INLINE_CHARACTERS + 1), ""])
def test_texts_that_wait_for_the_threads_are_bounded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty text: ids are decoded instead."""
    held, waiting = threading.Event(), WaitingJobs("tokenizer", 3, 2**20)

    tokenizer = Slow(held)
    reader = PromptReader(tokenizer, 100, 100_000, "a limit")

    async def call() -> None:
        await (reader.text("text", text) if text else decode(tokenizer, array("I", [1] * (INLINE_IDS + 1))))

    async def main() -> None:
        calls = [asyncio.create_task(call()) for _ in range(3)]
        try:
            await until(lambda: waiting._jobs.total == 3)
            with pytest.raises(Overloaded, match="3 texts wait to be read by the tokenizer; the limit for all is 3"):
                await call()
            calls.pop().cancel()
            await until(lambda: waiting._jobs.total == 2)
            calls.append(asyncio.create_task(call()))
        finally:
            held.set()
        await asyncio.gather(*calls)

    monkeypatch.setattr(prompt_reader, "_waiting", waiting)
    asyncio.run(main())
    assert waiting._jobs.total == waiting._bytes.total == 0
