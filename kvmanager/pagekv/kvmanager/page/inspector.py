"""JSON objects of the page's inspector: one block, or one request's block tables."""

from __future__ import annotations

from typing import Any

from pagekv.kvmanager.engine.views import BlockDetail, BlockView, SequenceView, by_name
from pagekv.kvmanager.text.tokenizer import Tokenizer


def block_detail(detail: BlockDetail, tokenizer: Tokenizer | None, *, with_tokens: bool) -> dict[str, Any]:
    """A device block. `with_tokens`: with its content, as text too where there is a tokenizer."""
    shown = by_name(detail)
    block, tokens = shown.pop("block"), shown.pop("token_ids")
    hashes = {"block_hash": block.block_hash.hex(), "parent_hash": block.parent_hash.hex()}
    shown |= by_name(block) | hashes
    if with_tokens and tokens is not None:
        shown |= {"token_ids": tokens, "text": tokenizer.decode(tokens) if tokenizer is not None else None}
    return shown


def host_block_detail(block: BlockView) -> dict[str, Any]:
    """A host block."""
    return {"block_id": block.block_id, "ref_count": block.ref_count, "block_hash": block.block_hash.hex()}


def request_detail(request_id: str, views: list[SequenceView] | None) -> dict[str, Any]:
    """A request's block tables in order of the tokens. None stands for a request that is not live and gives an empty
    list, without an error: requests end while somebody looks at them.
    """
    return {
        "request_id": request_id,
        "sequences": [
            {
                "index": view.index,
                "state": view.state,
                "tokens": view.num_tokens,
                "computed": view.computed_tokens,
                "block_ids": view.block_ids,
            }
            for view in views or []
        ],
    }
