"""One block, and one request's block table, as the page shows them when somebody asks."""

from __future__ import annotations

from typing import Any

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.view import EngineView
from pagekv.kvmanager.engine.views import SequenceView
from pagekv.kvmanager.text.tokenizer import Tokenizer

# Blocks of a chain, and requests that hold a block, that are named.
MAX_CHAIN = 256
MAX_HOLDERS_NAMED = 20


def block_detail(view: EngineView, block: int, tokenizer: Tokenizer | None, *, with_tokens: bool) -> dict[str, Any]:
    """A device block. `with_tokens`: also what it holds, in text where there is a tokenizer. Raises InvalidRequest."""
    pool, pins = view.scheduler.pool, view.cache.pins
    _check(block, pool.num_blocks)
    digest, parent = pool.table.digest(block), pool.table.parent(block)
    chain, complete = _chain(view, block)
    detail: dict[str, Any] = {
        "block_id": block,
        "ref_count": pool.ref_count(block),
        "pins": int(pins.holders[block]),
        "block_hash": digest.hex() if digest else "",
        "parent_hash": parent.hex() if parent else "",
        # Seconds since its content entered the prefix table; null where it is not in there.
        "cached_s": pool.table.age_s(block),
        # The blocks before it, its parent first.
        "chain": chain,
        "chain_complete": complete,
        "requests": _holders(view, block),
    }
    if with_tokens and digest is not None:
        tokens = pool.table.token_ids(block)
        detail |= {"token_ids": tokens, "text": tokenizer.decode(tokens) if tokenizer is not None else None}
    return detail


def host_block_detail(view: EngineView, block: int) -> dict[str, Any]:
    """A host block. Raises InvalidRequest."""
    host = view.scheduler.host
    _check(block, host.num_blocks)
    key = host.key(block)
    return {
        "block_id": block,
        "ref_count": int(host.ref_counts[block]),
        "block_hash": key.hex() if key else "",
    }


def _check(block: int, num_blocks: int) -> None:
    if block >= num_blocks:
        raise InvalidRequest("block_id", f"must be from 0 to {num_blocks - 1} (the pool), got {block}")


def _chain(view: EngineView, block: int) -> tuple[list[int], bool]:
    """The blocks before it, and whether the last of them begins a prompt."""
    table = view.scheduler.pool.table
    chain: list[int] = []
    while len(chain) < MAX_CHAIN:
        parent = table.parent(block)
        before = table.lookup(parent) if parent is not None else None
        if before is None:
            return chain, parent is not None
        chain.append(before)
        block = before
    return chain, False


def _holders(view: EngineView, block: int) -> list[str]:
    """The requests with a sequence that holds it, by arrival."""
    found: list[str] = []
    for request in view.live.all():
        for sequence in request.sequences:
            if (sequence.blocks() == block).any():
                found.append(request.command.request_id)
                break
        if len(found) == MAX_HOLDERS_NAMED:
            break
    return found


def request_detail(request_id: str, views: list[SequenceView] | None) -> dict[str, Any]:
    """A request's block tables in order of the tokens; None, of one that is not live: none. Requests end while somebody
    looks at them, so that is no error.
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
