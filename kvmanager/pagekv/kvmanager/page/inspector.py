"""JSON objects of the page's inspector: one block, or one request's block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagekv.kvmanager.engine.views import BlockDetail
from pagekv.kvmanager.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagekv.v1 import cache_service_pb2


def block_detail(detail: BlockDetail, tokenizer: Tokenizer | None, *, with_tokens: bool) -> dict[str, Any]:
    """A device block. `with_tokens`: with its content, as text too where there is a tokenizer."""
    shown: dict[str, Any] = {
        **host_block_detail(detail.block),
        "parent_hash": detail.block.parent_hash,
        "pins": detail.block.pins,
        "cached_s": detail.cached_s,
        "chain": detail.chain,
        "chain_complete": detail.chain_complete,
        "requests": detail.requests,
    }
    tokens = detail.token_ids
    if with_tokens and tokens is not None:
        shown |= {"token_ids": tokens, "text": tokenizer.decode(tokens) if tokenizer is not None else None}
    return shown


def host_block_detail(block: cache_service_pb2.BlockInfo) -> dict[str, Any]:
    """A host block."""
    return {"block_id": block.block_id, "ref_count": block.ref_count, "block_hash": block.block_hash}


def request_detail(request_id: str, found: cache_service_pb2.GetBlockTableResponse | None) -> dict[str, Any]:
    """A request's block tables in order of the tokens. None stands for a request that is not live and gives an empty
    list, without an error: requests end while somebody looks at them.
    """
    return {
        "request_id": request_id,
        "sequences": [
            {
                "index": table.index,
                "state": table.state,
                "tokens": table.num_tokens,
                "computed": table.computed_tokens,
                "block_ids": list(table.block_ids),
            }
            for table in (found.sequences if found is not None else ())
        ],
    }
