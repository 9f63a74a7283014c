"""Small commands that look into a running stack: health, version, model, stats, lookup, blocks and their like."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pagekv.client.calls import LARGEST_PAGE
from pagekv.client.cli.commands import top
from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.keypress import pause
from pagekv.client.cli.parser import (
    Subparsers,
    UsageError,
    add_command,
    add_identity,
    add_prompt,
    read_identity,
    read_prompt,
    token_ids,
)
from pagekv.client.cli.query import Shown, add_query
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError, Unavailable
from pagekv.client.generation_types import ChatMessage
from pagekv.client.types import BlockList, BlockState, RequestList, Stats
from pagekv.common.flags import integer, number
from pagekv.common.version import pagekv_version

Page = TypeVar("Page", BlockList, RequestList)
# The share of held blocks from which on the pool is called too small.
HIGH_USAGE = 0.8
STATS_EXAMPLES = """\
  pagekv stats
  pagekv stats --json | jq .prefix_hit_rate
  pagekv stats --json --watch 5
"""
LOOKUP_EXAMPLES = '  pagekv lookup "In the beginning God created the heaven"\n'
TOKENIZE_EXAMPLES = """\
  pagekv tokenize "In the beginning"
  pagekv tokenize - < story.txt
  pagekv tokenize --chat messages.json
"""
BLOCKS_EXAMPLES = "  pagekv blocks --state cached --limit 20\n"


def add(commands: Subparsers) -> None:
    """Adds the subcommands."""
    parser = add_command(
        commands, "stats", "show the KV pool, the prefix cache and the load", stats, examples=STATS_EXAMPLES
    )
    add_connection(parser)
    seconds = number(0.1, 3600)
    parser.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=seconds,
        metavar="S",
        help="every S seconds until Ctrl-C: pagekv top, or JSON [1]",
    )
    add_query(commands, "health", "say whether the stack serves; exit status 3 if not", health)
    parser = add_command(commands, "version", "show the versions of client and manager", version)
    add_connection(parser)
    add_query(commands, "model", "show the model served and its limits", model)
    parser = add_query(commands, "lookup", "say how much of a prompt is cached now", lookup, examples=LOOKUP_EXAMPLES)
    add_prompt(parser)
    add_identity(parser)
    parser = add_query(commands, "blocks", "list blocks of the pool", blocks, examples=BLOCKS_EXAMPLES)
    parser.add_argument("--state", choices=get_args(BlockState), help="only blocks in this state")
    parser.add_argument("--limit", type=integer(1, 2**32 - 1), default=100, metavar="N", help="blocks at most [100]")
    parser = add_query(commands, "requests", "list the live requests, those that run first", requests)
    parser.add_argument("--limit", type=integer(1, 2**32 - 1), default=100, metavar="N", help="requests at most [100]")
    parser = add_query(commands, "block-table", "show the block tables of a live request", block_table)
    parser.add_argument("request_id", metavar="REQUEST_ID")
    parser = add_query(commands, "reset-cache", "remove every cached prefix", reset_cache)
    parser.add_argument(
        "--force", action="store_true", help="preempt running requests, which go on by themselves, and end pins"
    )
    parser = add_query(commands, "abort", "end running requests", abort)
    parser.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")
    parser = add_query(
        commands, "tokenize", "show the token ids of a text or a conversation", tokenize, examples=TOKENIZE_EXAMPLES
    )
    add_prompt(parser)
    parser.add_argument(
        "--chat", type=Path, metavar="FILE", help='a JSON list of {"role": ..., "content": ...} instead'
    )
    parser = add_query(commands, "detokenize", "show the text of token ids", detokenize)
    parser.add_argument("token_ids", type=token_ids, metavar="IDS", help="such as 5,17,4")


def stats(args: argparse.Namespace, terminal: Terminal) -> int:
    """GetStats; --watch is what `pagekv top` shows, or JSON again and again."""
    if args.watch and not args.json:
        args.every, args.once = args.watch, False
        return top.run(args, terminal)
    with connect(args) as client:
        while True:
            now = client.stats()
            if not args.json:
                terminal.print(stats_text(now, terminal))
                return 0
            terminal.json(now)
            if not args.watch:
                return 0
            pause(args.watch)


def stats_text(now: Stats, terminal: Terminal) -> str:
    """Three groups of lines."""
    busy, idle = now.executor_busy_us_total, now.executor_idle_us_total
    # Blocks that are held cannot be evicted, so eviction has little left to take.
    pressure = "; above 80% new work preempts rather than evicts" if now.kv_usage > HIGH_USAGE else ""
    # Without a block in use there is no share to show.
    filled = f"{now.utilization:.1%}" if now.active_blocks else "-"
    groups = {
        "KV pool": [
            ("blocks", f"{now.num_device_blocks} of {now.block_size} tokens"),
            ("in use", f"{now.active_blocks} ({now.kv_usage:.1%}), slots filled {filled}{pressure}"),
            ("pinned", f"{now.pinned_blocks} by {now.pins} pins"),
            ("free", f"{now.free_blocks}, of these {now.cached_free_blocks} still cached"),
            ("evicted", f"{now.evicted_blocks_total}"),
            ("host pool", f"{now.num_host_blocks} blocks, {now.host_held_blocks} held by preempted sequences, "
                          f"{now.host_cached_blocks} cached, {now.host_evicted_blocks_total} evicted"),
            ("moved", f"{now.swapped_out_blocks_total} swapped out, {now.swapped_in_blocks_total} in, "
                      f"{now.written_back_blocks_total} written back"),
        ],
        "prefix cache": [
            ("blocks", f"{now.published_blocks}, watched by {now.watchers}"),
            ("hit rate", f"{now.prefix_hit_rate:.1%} of tokens, {now.block_hit_rate:.1%} of blocks"),
            ("prompt tokens", f"{now.prompt_tokens_total}, {now.cached_tokens_total} of them cached"),
            ("misses", f"{now.misses_never_seen_total} never seen, {now.misses_evicted_total} evicted, "
                       f"{now.misses_cleared_total} cleared, {now.misses_diverged_total} diverged, "
                       f"{now.misses_partial_tail_total} partial tail"),
            ("hash alarms", f"{now.hash_alarms_total} digests that stood for other tokens"),
        ],
        "load": [
            ("sequences", f"{now.running_sequences} running, {now.waiting_sequences} waiting"),
            ("requests", f"{now.requests_total}, {now.aborted_requests_total} aborted, "
                         f"{now.rejected_requests_total} refused, {now.failed_requests_total} failed"),
            ("generated", f"{now.generated_tokens_total} tokens"),
            ("computed", f"{now.computed_tokens_total} tokens in {now.steps_total} steps"),
            ("preemptions", f"{now.preemptions_total}, {now.swap_preemptions_total} of them by swap"),
            ("executor", ("attached" if now.executor_attached else "NOT ATTACHED")
                         + (f", {now.executor_threads} threads" if now.executor_threads else "")
                         + f", busy {busy / max(busy + idle, 1):.1%}, {now.executor_restarts_total} restarts"),
            *([("CUDA graphs", graphs_text(now.executor_graphs, now.executor_failed_graphs))]
              if now.executor_graphs or now.executor_failed_graphs else []),
            *([("ranks", ranks_text(now.executor_rank_us, now.executor_rank_differences_total))]
              if now.executor_rank_us else []),
        ],
    }  # fmt: skip  # laid out as a table
    return "\n".join(f"{terminal.bold(name)}\n{table(rows, indent='  ')}" for name, rows in groups.items())


def graphs_text(recorded: int, failed: int) -> str:
    """A line about the graphs of an executor."""
    trouble = f", {failed} FAILED: steps of their shapes are slower, the executor's log says why" if failed else ""
    return f"{recorded} recorded{trouble}"


def ranks_text(rank_us: Sequence[int], differences: int) -> str:
    """A line about the ranks of an executor: the work of each on a step, and which is the slowest."""
    times = " ".join(f"{us / 1e3:.2f}" for us in rank_us)
    slowest = max(range(len(rank_us)), key=rank_us.__getitem__)
    skew = (max(rank_us) - min(rank_us)) / 1e3
    differed = f", differed {differences} times" if differences else ""
    return f"{len(rank_us)}: {times} ms a step, rank {slowest} the slowest, skew {skew:.2f} ms{differed}"


def health(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Check of grpc.health.v1."""
    status = client.health()
    serves = {"target": client.target, "status": status}
    failure = None if status == "serving" else Unavailable(f"PageKV at {client.target} is not serving")
    return Shown(serves, f"{client.target} {status}", failure=failure)


def version(args: argparse.Namespace, terminal: Terminal) -> int:
    """The client's version always; the manager's, or why it does not say. Exit status 0 either way."""
    server, why = "", ""
    try:
        with connect(args) as client:
            server = client.model_info().server_version
    except PageKVError as error:
        why = str(error)
        if isinstance(error, Unavailable):
            # A manager without an executor says its own.
            server = error.server_version
    if args.json:
        terminal.json({"client": pagekv_version(), "server": server or None})
        return 0
    terminal.print(table([("client", pagekv_version()), ("server", server or "unknown")]))
    if why:
        terminal.note(why)
    return 0


def model(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """GetModelInfo."""
    info = client.model_info()
    rows = [
        ("model", info.model_id or "none"),
        ("fingerprint", info.model_fingerprint[:16]),
        ("backend", f"{info.backend}, keys and values as {info.kv_dtype}, sampler {info.sampler}"),
        ("features", ", ".join(info.features) or "none"),
        ("context", f"{info.max_model_len} tokens"),
        ("vocabulary", f"{info.vocab_size} tokens, end of text {', '.join(map(str, info.eos_token_ids)) or 'none'}"),
        ("input", "token ids" + ", text" * info.has_tokenizer + ", chat" * info.has_chat_template),
        ("device pool", f"{info.num_device_blocks} blocks of {info.block_size} tokens"),
        ("host pool", f"{info.num_host_blocks} blocks" if info.num_host_blocks else "none"),
    ]
    return Shown(info, table(rows))


def lookup(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """LookupPrefix."""
    found = client.lookup_prefix(read_prompt(args), **read_identity(args))
    cached = found.device_tokens + found.host_tokens
    lines = [
        f"{cached} of {found.prompt_tokens} tokens cached ({cached / max(found.prompt_tokens, 1):.0%}): "
        f"{found.device_tokens} on the device, {found.host_tokens} on the host"
    ]
    if found.partial_tokens:
        lines.append(f"{found.partial_tokens} more begin a cached block, which a copy of it would serve")
    if found.block_ids:
        lines.append(f"blocks {' '.join(map(str, found.block_ids))}")
    return Shown(found, "\n".join(lines))


def _pages(limit: int, field: str, ask: Callable[[int, str], Page]) -> Page:
    """As many pages as it takes, as one; `ask` gives one of a size, behind a token."""
    page = ask(min(limit, LARGEST_PAGE), "")
    found = list(getattr(page, field))
    while page.next_page_token and (left := limit - len(found)) > 0:
        page = ask(min(left, LARGEST_PAGE), page.next_page_token)
        found += getattr(page, field)
    entries: Any = tuple(found)
    return replace(page, **{field: entries})


def blocks(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """ListBlocks."""
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
    """ListRequests."""
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
    """GetBlockTable."""
    sequences = client.block_table(args.request_id)
    lines = [
        f"sequence {s.index}: {s.state}, {s.num_tokens} tokens, {s.computed_tokens} computed; "
        f"blocks {' '.join(map(str, s.block_ids)) or '-'}"
        for s in sequences
    ]
    return Shown({"sequences": list(map(asdict, sequences))}, "\n".join(lines))


def reset_cache(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """ResetPrefixCache."""
    reset = client.reset_prefix_cache(force=args.force)
    also = f"; {reset.preempted_sequences} sequences preempted, {reset.ended_pins} pins ended" if args.force else ""
    return Shown(reset, f"{reset.removed_blocks} blocks removed{also}")


def abort(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Abort; that none of the requests was live is no failure."""
    aborted = client.abort(*args.request_ids)
    return Shown({"aborted": aborted}, f"aborted: {' '.join(aborted) or 'none was running'}")


def tokenize(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Tokenize. Raises UsageError."""
    if (args.prompt, args.token_ids, args.chat).count(None) != 2:
        raise UsageError("exactly one of PROMPT, --token-ids and --chat is required")
    ids = client.tokenize(read_prompt(args) if args.chat is None else _conversation(args))
    return Shown({"token_ids": ids}, ",".join(map(str, ids)))


def _conversation(args: argparse.Namespace) -> list[ChatMessage]:
    """The messages of --chat. Raises UsageError."""
    try:
        return [ChatMessage(each["role"], each["content"]) for each in json.loads(args.chat.read_text("utf-8"))]
    except OSError as error:
        raise UsageError(f"--chat: {args.chat}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f'--chat: {args.chat}: must be a JSON list of {{"role": ..., "content": ...}}') from error


def detokenize(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Detokenize."""
    text = client.detokenize(args.token_ids)
    return Shown({"text": text}, text)
