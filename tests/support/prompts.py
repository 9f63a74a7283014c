"""Prompt messages, short to write."""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.v1 import types_pb2


def as_prompt(prompt: str | Sequence[int]) -> types_pb2.Prompt:
    """A prompt of text or of token ids."""
    if isinstance(prompt, str):
        return types_pb2.Prompt(text=prompt)
    return types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=prompt))


def as_chat(*messages: tuple[str, str]) -> types_pb2.Prompt:
    """A conversation; each message is a role and its words."""
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role=role, content=words) for role, words in messages])
    return types_pb2.Prompt(chat=chat)
