"""Turns a prompt (text, token ids or a conversation) into checked token ids, outside the event loop if it is long.

The length of a text is checked before it is encoded. A short text is encoded at once, a longer one in one of two
threads. Long texts are encoded one after the other in a separate process, because encoding needs hundreds of bytes of
memory for each token.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pagekv.common.errors import InvalidRequest
from pagekv.common.large_messages import MAX_TEXT_BYTES
from pagekv.common.turns import let_others_run
from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.kvcache.block_hash import TOKEN_BYTES
from pagekv.kvmanager.tenants.turns import TenantTurns
from pagekv.kvmanager.text.template_sandbox import ChatTemplateError
from pagekv.kvmanager.text.tokenizer import TextRefused, Tokenizer, TooManyTokens
from pagekv.kvmanager.text.waiting_jobs import WaitingJobs
from pagekv.kvmanager.text.worker_process import MAX_WAITING_BYTES, WorkerStopped

if TYPE_CHECKING:
    from pagekv.v1 import types_pb2

# By kind of prompt: the field that refusals name.
PROMPT_FIELDS = {"text": "prompt.text", "token_ids": "prompt.token_ids.ids", "chat": "prompt.chat.messages"}
# A text may have this many bytes for each token that a prompt may have. Only texts of white space and the like have so
# many bytes per token on average.
BYTES_PER_TOKEN = 32
MAX_CHAT_MESSAGES = 4096
# Texts longer than this are encoded in a thread: 4096 characters take about a millisecond.
INLINE_CHARACTERS = 4096
# Texts longer than this are encoded in the worker process.
THREAD_CHARACTERS = 64 * 2**10
# Lists of token ids that are longer are decoded in a thread, or in the worker process.
INLINE_IDS, THREAD_IDS = 1024, 16 * 2**10
# Messages of a conversation that are read between two turns of the event loop.
MESSAGES_AT_ONCE = 512
# A list of more token ids is copied and checked in separate turns of the event loop.
COPIED_AT_ONCE = 64 * 2**10

_NUM_THREADS = 2
_threads = ThreadPoolExecutor(_NUM_THREADS, "text")
# Each tenant has at most as many texts at the threads as there are threads, so that other tenants' texts need not wait
# for all of them.
_turns = TenantTurns(_NUM_THREADS)
# More texts than --max-queue lets in by default; in bytes, as many as of longer texts.
MAX_IN_THREADS = 4096
_waiting = WaitingJobs("tokenizer", MAX_IN_THREADS, MAX_WAITING_BYTES)
_Done = TypeVar("_Done")


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_tokens: int, limit_name: str) -> None:
        """Prompts have at most `max_tokens` tokens; `limit_name` says in words where that bound comes from."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._limit_name = limit_name

    async def read(self, prompt: types_pb2.Prompt) -> array[int]:
        """Token ids of a prompt, uint32, in the field `prompt` of a request. Raises InvalidRequest,
        Overloaded and Unavailable.
        """
        kind = prompt.WhichOneof("kind")
        if kind == "text":
            return await self.text(PROMPT_FIELDS[kind], prompt.text)
        if kind == "token_ids":
            return await self._checked_ids(PROMPT_FIELDS[kind], prompt.token_ids.ids)
        if kind == "chat":
            return await self._chat(PROMPT_FIELDS[kind], prompt.chat)
        raise InvalidRequest("prompt", "exactly one of text, token_ids and chat must be set")

    async def text(self, field: str, text: str) -> array[int]:
        """Token ids of a text, uint32, given in `field`, with the tokenizer's special tokens. Raises as `read` does."""
        tokenizer = self._need_tokenizer(field)
        if not text:
            raise InvalidRequest(field, "must not be empty")
        self._check_text_bytes(field, _num_bytes(text))
        return await self._encode(field, text, tokenizer, special_tokens=True)

    async def _chat(self, field: str, chat: types_pb2.Chat) -> array[int]:
        """Token ids of a conversation through the chat template."""
        tokenizer = self._need_tokenizer("prompt.chat")
        template = tokenizer.chat_template
        if template is None:
            raise InvalidRequest("prompt.chat", "the model has no chat template; give text or token ids")
        if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
            raise InvalidRequest(field, f"must have from 1 to {MAX_CHAT_MESSAGES} messages, has {len(chat.messages)}")
        messages: list[dict[str, str]] = []
        size = 0
        for index, message in enumerate(chat.messages):
            if index and index % MESSAGES_AT_ONCE == 0:
                await asyncio.sleep(0)
            role, content = message.role, message.content
            if not role:
                raise InvalidRequest(f"{field}[{index}].role", "must not be empty")
            size += _num_bytes(role) + _num_bytes(content)
            messages.append({"role": role, "content": content})
        self._check_text_bytes(field, size)
        try:
            text = await template.render(messages)
        except ChatTemplateError as error:
            raise InvalidRequest(field, str(error)) from error
        self._check_text_bytes(field, _num_bytes(text), "rendered with the chat template ")
        # The template writes the special tokens itself.
        return await self._encode(field, text, tokenizer, special_tokens=False)

    async def _checked_ids(self, field: str, ids: Sequence[int]) -> array[int]:
        if not ids:
            raise InvalidRequest(field, "must have at least one token id")
        self._check_count(field, len(ids))
        # A copy of a million ids takes milliseconds, so each copy has its own turn of the event loop.
        long = len(ids) > COPIED_AT_ONCE
        if long:
            await let_others_run()
        prompt = token_array(ids)
        if long:
            await let_others_run()
        check_token_ids(field, prompt, self._vocab_size)
        if long:
            await let_others_run()
        return prompt

    async def _encode(self, field: str, text: str, tokenizer: Tokenizer, *, special_tokens: bool) -> array[int]:
        def work() -> array[int]:
            return token_array(tokenizer.encode(text, special_tokens=special_tokens, limit=self._max_tokens))

        try:
            if len(text) <= INLINE_CHARACTERS:
                ids = work()
            elif len(text) <= THREAD_CHARACTERS:
                ids = await _in_thread(work, _num_bytes(text))
            else:
                # A copy of 4 MB takes a millisecond, so the next copy has its own turn of the event loop.
                await asyncio.sleep(0)
                ids = await tokenizer.encode_long(text, special_tokens=special_tokens, limit=self._max_tokens)
        except TooManyTokens as error:
            self._check_count(field, error.num_tokens)
            raise
        except (TextRefused, WorkerStopped) as error:
            raise InvalidRequest(field, f"must be text that the tokenizer can encode: {error}") from error
        if not ids:
            raise InvalidRequest(field, "must have at least one token; this prompt has none")
        check_token_ids(field, ids, self._vocab_size)
        return ids

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(field, "this deployment has no tokenizer; give token ids")
        return self._tokenizer

    def _check_text_bytes(self, field: str, size: int, what: str = "") -> None:
        most, why = MAX_TEXT_BYTES, "4 MB"
        if self._max_tokens * BYTES_PER_TOKEN < most:
            most = self._max_tokens * BYTES_PER_TOKEN
            why = f"{BYTES_PER_TOKEN} for each of {self._max_tokens} tokens, {self._limit_name}"
        if size > most:
            raise InvalidRequest(field, f"must be at most {most} bytes of UTF-8 ({why}), {what}has {size}")

    def _check_count(self, field: str, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                field, f"has {num_tokens} tokens, must have from 1 to {self._max_tokens} ({self._limit_name})"
            )


def _num_bytes(text: str) -> int:
    """Bytes of the text in UTF-8; an ASCII text is not copied for it."""
    return len(text) if text.isascii() else len(text.encode())


def token_array(ids: Sequence[int]) -> array[int]:
    """Token ids of a message, uint32. NumPy reads a repeated field in a hundredth of the time of building a list."""
    found = array("I")
    found.frombytes(np.asarray(ids, np.uint32).data.cast("B"))
    return found


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id that is not below the vocabulary size. Needs at least one id."""
    ids = np.asarray(token_ids)
    if ids.max() >= vocab_size:
        index = int((ids >= vocab_size).argmax())
        token_id = token_ids[index]
        raise InvalidRequest(
            f"{field}[{index}]", f"must be from 0 to {vocab_size - 1} (the vocabulary), got {token_id}"
        )


async def _in_thread(work: Callable[[], _Done], num_bytes: int) -> _Done:
    """The result of `work` on so many bytes. Raises what it raises, and Overloaded if too much waits."""
    tenant = tenant_of_call()
    _waiting.enter(tenant, num_bytes)
    try:
        async with _turns.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(_threads, work)
    finally:
        _waiting.leave(tenant, num_bytes)


async def decode(tokenizer: Tokenizer, token_ids: array[int]) -> bytes:
    """UTF-8 of the text of checked token ids, uint32. Raises InvalidRequest, and Overloaded."""
    try:
        if len(token_ids) <= INLINE_IDS:
            return tokenizer.decode(token_ids).encode()
        if len(token_ids) <= THREAD_IDS:
            return (await _in_thread(lambda: tokenizer.decode(token_ids), TOKEN_BYTES * len(token_ids))).encode()
        return await tokenizer.decode_long(token_ids)
    except (TextRefused, WorkerStopped) as error:
        raise InvalidRequest("token_ids", f"must be ids that the tokenizer can decode: {error}") from error
