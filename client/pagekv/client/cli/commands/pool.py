"""`pagekv blocks`, `requests` and `block-table`: the pool and its users; `reset-cache` and `abort` empty it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast, get_args

from pagekv.client.calls import LARGEST_PAGE
from pagekv.client.cli.parser import Subparsers
from pagekv.client.cli.query import Shown, add_query
from pagekv.client.cli.terminal import Terminal, counted, table
from pagekv.client.client import PageKVClient
from pagekv.client.types import BlockList, BlockState, RequestList
from pagekv.common.flags import integer

Page = TypeVar("Page", BlockList, RequestList)
BLOCKS_EXAMPLES = "  pagekv blocks --state cached --limit 20\n"


def add(commands: Subparsers) -> None:
    parser = add_query(commands, "blocks", "list blocks of the pool", blocks, examples=BLOCKS_EXAMPLES)
    parser.add_argument("--state", choices=get_args(BlockState), help="only blocks in this state")
    parser.add_argument(
        "--limit", type=integer(1, 2**32 - 1), default=100, metavar="N", help="most blocks to list [100]"
    )
    parser = add_query(commands, "requests", "list the live requests, running ones first", requests)
    parser.add_argument(
        "--limit", type=integer(1, 2**32 - 1), default=100, metavar="N", help="most requests to list [100]"
    )
    parser = add_query(commands, "block-table", "show the block tables of a live request", block_table)
    parser.add_argument("request_id", metavar="REQUEST_ID")
    parser = add_query(commands, "reset-cache", "remove every cached prefix", reset_cache)
    parser.add_argument(
        "--force",
        action="store_true",
        help="also if blocks are in use: running requests are preempted and then continue, pins end",
    )
    parser = add_query(commands, "abort", "end running requests", abort)
    parser.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")


def _pages(limit: int, field: str, ask: Callable[[int, str], Page]) -> Page:
    """Up to `limit` entries from as many pages as needed, as one page. `ask` returns a page, given its size and page
    token.
    """
    page = ask(min(limit, LARGEST_PAGE), "")
    found = list(getattr(page, field))
    while page.next_page_token and (left := limit - len(found)) > 0:
        page = ask(min(left, LARGEST_PAGE), page.next_page_token)
        found += getattr(page, field)
    return replace(page, **{field: cast("Any", tuple(found))})


def blocks(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    found = _pages(
        args.limit, "blocks", lambda size, token: client.list_blocks(args.state, page_size=size, page_token=token)
    )
    rows = [
        (b.block_id, b.state, b.ref_count, b.pins, b.block_hash[:16] or "-", b.parent_hash[:16] or "-")
        for b in found.blocks
    ]
    text = table(rows, ("block", "state", "refs", "pins", "hash", "parent")) if rows else "no such blocks"
    return Shown(found, text, note="there are more: raise --limit" if found.next_page_token else "")


def requests(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    found = _pages(args.limit, "requests", client.list_requests)
    rows = [
        (r.request_id, r.state, r.priority, r.prompt_tokens, r.cached_tokens, r.generated_tokens, r.num_blocks,
         r.preemptions, r.namespace or "-")
        for r in found.requests
    ]  # fmt: skip  # laid out as a table
    heads = ("request", "state", "priority", "prompt", "cached", "generated", "blocks", "preempted", "namespace")
    text = table(rows, heads) if rows else "no live requests"
    return Shown(found, text, note=f"{found.total} in all: raise --limit" if found.next_page_token else "")


def block_table(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    sequences = client.block_table(args.request_id)
    lines = [
        f"sequence {s.index}: {s.state}, {s.num_tokens} tokens, {s.computed_tokens} computed; "
        f"blocks {' '.join(map(str, s.block_ids)) or '-'}"
        for s in sequences
    ]
    return Shown({"sequences": sequences}, "\n".join(lines))


def reset_cache(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    reset = client.reset_prefix_cache(force=args.force)
    also = ""
    if args.force:
        preempted = counted(reset.preempted_sequences, "sequence")
        also = f"; {preempted} preempted, {counted(reset.ended_pins, 'pin')} ended"
    return Shown(reset, f"{counted(reset.removed_blocks, 'block')} removed{also}")


def abort(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Ends requests. It is not a failure if none of them was live."""
    aborted = client.abort(*args.request_ids)
    return Shown({"aborted": aborted}, f"aborted: {' '.join(aborted) or 'none was running'}")
