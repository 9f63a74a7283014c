"""Prompts: what a deployment without tokenizer or template refuses, and where long ones are read."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from support.engine.fake_engine import MODEL
from support.engine.generate_requests import (
    NO_TEMPLATE,
    TOKENIZER,
    chat,
    ids,
    read,
    sampled,
)
from support.prompts import as_prompt

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.validation import read_generate
from pagekv.kvmanager.text.tokenizer import Tokenizer
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
            read_generate(pb.GenerateRequest(prompt=as_prompt("x")), replace(MODEL, vocab_size=3), TOKENIZER, "")
        )


@pytest.mark.parametrize(("text", "in_a_thread"), [("the earth", False), ("the earth " * 2000, True)])
def test_long_texts_do_not_hold_up_the_event_loop(
    text: str, in_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts are encoded in a thread, which leaves the interpreter to others."""
    threads = []

    def encode(tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return [5]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    assert list(read(pb.GenerateRequest(prompt=as_prompt(text)))[0].prompt_ids) == [5]
    assert threads == [in_a_thread]


def test_huge_lists_of_ids_are_refused_by_their_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        raise AssertionError("no id needs to be looked at")

    monkeypatch.setattr("pagekv.kvmanager.api.prompt_reader.check_token_ids", look)
    with pytest.raises(InvalidRequest, match="has 2000000 tokens"):
        read(ids(*[2**32 - 1] * 2_000_000))
