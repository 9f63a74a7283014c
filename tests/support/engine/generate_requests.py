"""Generate requests for tests of validation, short to write, and what reads them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from support.engine import small_tokenizers
from support.engine.fake_engine import MODEL
from support.prompts import as_chat, as_prompt

from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.api.validation import read_generate
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.text.chat_template import ChatTemplate
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
    "<|user|>{{ m.content }}{% endfor %}",
    {"bos_token": "<s>"},
)
TOKENIZER = Tokenizer(small_tokenizers.byte_level(), TEMPLATE)
NO_TEMPLATE = Tokenizer(small_tokenizers.byte_level())
IDS = as_prompt([5, 6, 7, 8])


def read(
    request: pb.GenerateRequest, tokenizer: Tokenizer | None = TOKENIZER, **model: Any
) -> tuple[GenerateCommand, list[str]]:
    """With a pool that holds the whole context unless told otherwise."""
    return asyncio.run(
        read_generate(request, Served(replace(MODEL, **{"num_device_blocks": 16, **model}), tokenizer), "")
    )


def sampled(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=IDS, sampling_params=types_pb2.SamplingParams(**params))


def beams(width: int = 4, **params: Any) -> pb.GenerateRequest:
    return sampled(beam_width=width, **params)


def cached(**controls: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=IDS, cache=types_pb2.CacheControls(**controls))


def media(position: int, length: int) -> pb.GenerateRequest:
    return cached(media_hashes=[types_pb2.MediaHash(position=position, length=length, hash="d")])


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=as_chat(*messages))


def ids(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=as_prompt(token_ids), **fields)


def resumed(tokens: int, **fields: Any) -> pb.GenerateRequest:
    """After a prompt of two tokens."""
    return ids(5, 6, resumed_token_ids=[7] * tokens, **fields)
