"""Turns a prompt (text, token ids or a conversation) into checked token ids, off the event loop if long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.text.chat_template import ChatTemplateError
from pagekv.kvmanager.text.tokenizer import Tokenizer, TooManyTokens

if TYPE_CHECKING:
    from pagekv.v1 import cache_service_pb2, inference_service_pb2, types_pb2

    # The messages whose oneof `input` is a prompt.
    PromptRequest: TypeAlias = (
        inference_service_pb2.GenerateRequest
        | cache_service_pb2.LookupPrefixRequest
        | cache_service_pb2.ExplainPrefixRequest
        | cache_service_pb2.PinPrefixRequest
    )

MAX_TEXT_BYTES = 8 * 2**20
MAX_CHAT_MESSAGES = 4096
# Texts longer than this are encoded in a thread: 4096 characters take about a millisecond.
INLINE_CHARACTERS = 4096


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_tokens: int, limit_name: str) -> None:
        """Prompts have at most `max_tokens` tokens; `limit_name` says in words where that bound comes from."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._limit_name = limit_name

    async def read(self, request: PromptRequest) -> list[int]:
        """Token ids of the input that the request has. Raises InvalidRequest."""
        kind = request.WhichOneof("input")
        if kind == "text":
            return await self.text(request.text)
        if kind == "tokenized":
            return self.tokenized(request.tokenized)
        if kind == "chat":
            return await self.chat(request.chat)
        raise InvalidRequest("input", "exactly one of text, tokenized and chat must be set")

    async def text(self, text: str) -> list[int]:
        """Token ids of a text with the tokenizer's special tokens. Raises InvalidRequest."""
        tokenizer = self._need_tokenizer("text")
        if not text:
            raise InvalidRequest("text", "must not be empty")
        _check_text_bytes("text", len(text.encode()))
        return await self._encode("text", len(text), lambda: text, tokenizer, special_tokens=True)

    async def chat(self, chat: types_pb2.ChatInput) -> list[int]:
        """Token ids of a conversation through the chat template. Raises InvalidRequest."""
        tokenizer = self._need_tokenizer("chat")
        template = tokenizer.chat_template
        if template is None:
            raise InvalidRequest("chat", "the model has no chat template; give text or tokenized input")
        if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
            raise InvalidRequest(
                "chat.messages", f"must have from 1 to {MAX_CHAT_MESSAGES} messages, has {len(chat.messages)}"
            )
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        for index, message in enumerate(messages):
            if not message["role"]:
                raise InvalidRequest(f"chat.messages[{index}].role", "must not be empty")
        size = sum(len(message["role"].encode()) + len(message["content"].encode()) for message in messages)
        _check_text_bytes("chat.messages", size)

        def render() -> str:
            try:
                return template.render(messages)
            except ChatTemplateError as error:
                raise InvalidRequest("chat.messages", str(error)) from error

        # The template writes the special tokens itself.
        return await self._encode("chat.messages", size + 64 * len(messages), render, tokenizer, special_tokens=False)

    def tokenized(self, tokenized: types_pb2.TokenizedInput) -> list[int]:
        """Checked token ids. Raises InvalidRequest."""
        ids = tokenized.input_ids
        if not ids:
            raise InvalidRequest("tokenized.input_ids", "must have at least one token id")
        self._check_count("tokenized.input_ids", len(ids))
        prompt = list(ids)
        check_token_ids("tokenized.input_ids", prompt, self._vocab_size)
        return prompt

    async def _encode(
        self, field: str, size: int, source: Callable[[], str], tokenizer: Tokenizer, *, special_tokens: bool
    ) -> list[int]:
        """Encodes the text that `source` gives, in a thread if it is long (`size` is a guess in characters)."""

        def work() -> list[int]:
            ids = tokenizer.encode(source(), special_tokens=special_tokens, limit=self._max_tokens)
            if ids:
                check_token_ids(field, ids, self._vocab_size)
            return ids

        try:
            ids = work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except TooManyTokens as error:
            self._check_count(field, error.num_tokens)
            raise
        if not ids:
            raise InvalidRequest(field, "must have at least one token; this input has none")
        return ids

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(field, "this deployment has no tokenizer; give token ids")
        return self._tokenizer

    def _check_count(self, field: str, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                field, f"has {num_tokens} tokens, must have from 1 to {self._max_tokens} ({self._limit_name})"
            )


def check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id that is not below the vocabulary size."""
    if max(token_ids) >= vocab_size:
        index, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise InvalidRequest(
            f"{field}[{index}]", f"must be from 0 to {vocab_size - 1} (the vocabulary), got {token_id}"
        )


def _check_text_bytes(field: str, size: int) -> None:
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_TEXT_BYTES} bytes (8 MiB) of UTF-8, has {size}")
