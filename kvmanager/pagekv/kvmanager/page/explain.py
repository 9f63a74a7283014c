"""The page's explain box: which blocks of a prompt hit, and why the others miss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.prompt_reader import PromptReader, check_token_ids
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.api.validation import MAX_NAME_BYTES, check_adapter, count_text
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import types_pb2

# Most blocks that are explained; the page says how many more the prompt has.
MAX_BLOCKS = 1000
# Blocks whose text is made between two turns of the event loop.
BLOCKS_AT_ONCE = 100
_FIELDS = frozenset({"text", "token_ids", "namespace", "adapter"})


async def explain(engine: EngineLoop, served: Served, asked: object) -> dict[str, Any]:
    """The answer to an object with "text" or "token_ids". Raises InvalidRequest, NotFound, Unavailable, and as
    ExplainPrefix does PermissionDenied and Overloaded.
    """
    if not isinstance(asked, dict) or not asked.keys() <= _FIELDS:
        raise InvalidRequest("body", f"must be a JSON object with fields among {', '.join(sorted(_FIELDS))}")
    if ("text" in asked) == ("token_ids" in asked):
        raise InvalidRequest("body", "exactly one of text and token_ids must be given")
    namespace, adapter = _name(asked, "namespace"), _name(asked, "adapter")
    check_adapter(adapter, served.asking)
    identity = served.asking.cache_identity(namespace, read=True)
    prompt = await _prompt(served, asked)
    prepared = await engine.queries.prepare(prompt, identity, served.asking.tenant.name)
    found = await engine.queries.explain_prefix(prompt, identity, MAX_BLOCKS, prepared=prepared)
    blocks = []
    for index, block in enumerate(found.blocks):
        if index % BLOCKS_AT_ONCE == 0:
            await asyncio.sleep(0)
        blocks.append(_block(block, prompt, served.tokenizer))
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": found.cached_tokens,
        "num_blocks": -(-len(prompt) // served.model.block_size),
        "blocks": blocks,
    }


def _name(asked: dict[str, Any], field: str) -> str:
    name = asked.get(field, "")
    if not _is_text(name) or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(field, f"must be text of at most {MAX_NAME_BYTES} bytes")
    return str(name)


def _is_text(value: object) -> bool:
    """Whether a JSON value is text that can be encoded. JSON can contain lone surrogates, which cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


async def _prompt(served: Served, asked: dict[str, Any]) -> Sequence[int]:
    model = served.model
    if "text" in asked:
        if not _is_text(asked["text"]):
            raise InvalidRequest("text", "must be text")
        count_text(types_pb2.Prompt(text=asked["text"]), served.asking)
        limit = f"the context has {model.max_model_len} tokens"
        reader = PromptReader(served.tokenizer, model.vocab_size, model.max_model_len, limit)
        return await reader.text("text", asked["text"])
    ids = asked["token_ids"]
    if isinstance(ids, list) and not 1 <= len(ids) <= model.max_model_len:
        raise InvalidRequest("token_ids", f"has {len(ids)} tokens, must have from 1 to {model.max_model_len}")
    await asyncio.sleep(0)
    # type() and not isinstance(), because a bool is an int in Python.
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or min(ids) < 0:
        raise InvalidRequest("token_ids", "must be a list of whole numbers from 0 on")
    await asyncio.sleep(0)
    check_token_ids("token_ids", ids, model.vocab_size)
    return ids


def _block(block: pb.BlockExplanation, prompt: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "start": block.start,
        "end": block.end,
        "outcome": pb.BlockOutcome.Name(block.outcome).removeprefix("BLOCK_OUTCOME_").lower(),
        "reason": block.reason,
        "block_id": block.block_id if block.HasField("block_id") else None,
        "block_hash": block.block_hash,
        "shared_tokens": block.shared_tokens,
        # The part of the prompt's text in this block.
        "text": tokenizer.decode(prompt[block.start : block.end]) if tokenizer is not None else None,
    }
