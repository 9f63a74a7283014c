"""Small commands that look into a running stack: health, model, stats, lookup, blocks, tokenize and their like."""

from __future__ import annotations

import argparse
import time
from typing import get_args

from pagekv.client.cli.parser import (
    Subparsers,
    add_command,
    add_prompt,
    add_target,
    connect,
    read_prompt,
    token_ids,
)
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.types import BlockState, CacheControls, Stats
from pagekv.common.flags import integer, number

# The share of held blocks from which on the pool is called too small.
HIGH_USAGE = 0.8
STATS_EXAMPLES = """\
  pagekv stats
  pagekv stats --watch
  pagekv stats --json | jq .prefix_hit_rate
"""


def add(commands: Subparsers) -> None:
    """Adds the subcommands."""
    parser = add_command(
        commands, "stats", "show the KV pool, the prefix cache and the load", stats, examples=STATS_EXAMPLES
    )
    add_target(parser)
    parser.add_argument(
        "--watch", nargs="?", const=1.0, type=number(0.1, 3600), metavar="S", help="again every S seconds [1]"
    )
    parser = add_command(commands, "health", "say whether the stack serves; exit status 1 if not", health)
    add_target(parser)
    parser = add_command(commands, "model", "show the model served and its limits", model)
    add_target(parser)
    parser = add_command(
        commands,
        "lookup",
        "say how much of a prompt is cached now",
        lookup,
        examples='  pagekv lookup "In the beginning God created the heaven"\n',
    )
    add_prompt(parser)
    add_target(parser)
    parser.add_argument("--namespace", default="", metavar="NAME", help="look in this namespace")
    parser = add_command(
        commands, "blocks", "list blocks of the pool", blocks, examples="  pagekv blocks --state cached --limit 20\n"
    )
    add_target(parser)
    parser.add_argument("--state", choices=get_args(BlockState), help="only blocks in this state")
    parser.add_argument("--start", type=integer(0, 2**32 - 1), default=0, metavar="ID", help="first block id [0]")
    parser.add_argument("--limit", type=integer(1, 10_000), default=100, metavar="N", help="blocks at most [100]")
    parser = add_command(commands, "block-table", "show the block tables of a live request", block_table)
    parser.add_argument("request_id", metavar="REQUEST_ID")
    add_target(parser)
    parser = add_command(commands, "reset-cache", "forget every cached prefix", reset_cache)
    add_target(parser)
    parser.add_argument(
        "--force", action="store_true", help="preempt running requests, which go on by themselves, and end pins"
    )
    parser = add_command(commands, "abort", "end running requests", abort)
    parser.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")
    add_target(parser)
    parser = add_command(commands, "tokenize", "show the token ids of a text", tokenize)
    parser.add_argument("text", metavar="TEXT")
    add_target(parser)
    parser = add_command(commands, "detokenize", "show the text of token ids", detokenize)
    parser.add_argument("token_ids", type=token_ids, metavar="IDS", help="such as 5,17,4")
    add_target(parser)


def stats(args: argparse.Namespace, terminal: Terminal) -> int:
    """GetStats, once or again and again."""
    with connect(args) as client:
        now, at = client.stats(), time.monotonic()
        if args.json:
            terminal.json(now)
        else:
            terminal.print(stats_text(now, terminal))
        while args.watch:
            time.sleep(args.watch)
            before, before_at = now, at
            now, at = client.stats(), time.monotonic()
            if args.json:
                terminal.json(now)
            else:
                rate = (now.generated_tokens_total - before.generated_tokens_total) / (at - before_at)
                terminal.redraw(stats_text(now, terminal, generated_per_s=rate))
    return 0


def stats_text(now: Stats, terminal: Terminal, generated_per_s: float | None = None) -> str:
    """Three groups of lines."""
    busy, idle = now.executor_busy_us_total, now.executor_idle_us_total
    generated = f"{now.generated_tokens_total}"
    if generated_per_s is not None:
        generated += f" ({generated_per_s:.0f}/s)"
    # What cannot be evicted leaves eviction nothing to do.
    pressure = "; above 80% new work preempts rather than evicts" if now.kv_usage > HIGH_USAGE else ""
    groups = {
        "KV pool": [
            ("blocks", f"{now.num_blocks} of {now.block_size} tokens"),
            ("in use", f"{now.active_blocks} ({now.kv_usage:.1%}), slots filled {now.utilization:.1%}{pressure}"),
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
            ("hash alarms", f"{now.hash_alarms_total}"),
        ],
        "load": [
            ("sequences", f"{now.running_sequences} running, {now.waiting_sequences} waiting"),
            ("requests", f"{now.requests_total}, {now.aborted_requests_total} aborted, "
                         f"{now.rejected_requests_total} refused"),
            ("generated", f"{generated} tokens"),
            ("computed", f"{now.computed_tokens_total} tokens in {now.steps_total} steps"),
            ("preemptions", f"{now.preemptions_total}, {now.swap_preemptions_total} of them by swap"),
            ("executor", ("attached" if now.executor_attached else "NOT ATTACHED")
                         + f", busy {busy / max(busy + idle, 1):.1%}, {now.executor_restarts_total} restarts"),
        ],
    }  # fmt: skip  # laid out as a table
    parts = [f"{terminal.bold(name)}\n{table(rows, indent='  ')}" for name, rows in groups.items()]
    return "\n".join(parts)


def health(args: argparse.Namespace, terminal: Terminal) -> int:
    """grpc.health.v1 of the manager."""
    with connect(args) as client:
        status = client.health()
    if args.json:
        terminal.json({"target": args.target, "status": status})
    else:
        terminal.print(f"{args.target} {status}")
    return 0 if status == "SERVING" else 1


def model(args: argparse.Namespace, terminal: Terminal) -> int:
    """GetModelInfo."""
    with connect(args) as client:
        info = client.model_info()
    if args.json:
        terminal.json(info)
        return 0
    rows = [
        ("model", info.model_id or "none"),
        ("fingerprint", info.model_fingerprint[:16]),
        ("backend", info.backend),
        ("context", f"{info.max_model_len} tokens"),
        ("vocabulary", f"{info.vocab_size} tokens, end of text {', '.join(map(str, info.eos_token_ids)) or 'none'}"),
        ("input", "token ids" + ", text" * info.has_tokenizer + ", chat" * info.has_chat_template),
        ("device pool", f"{info.num_device_blocks} blocks of {info.block_size} tokens"),
        ("host pool", f"{info.num_host_blocks} blocks" if info.num_host_blocks else "none"),
    ]
    terminal.print(table(rows))
    return 0


def lookup(args: argparse.Namespace, terminal: Terminal) -> int:
    """LookupPrefix."""
    with connect(args) as client:
        found = client.lookup_prefix(read_prompt(args), cache=CacheControls(namespace=args.namespace))
    if args.json:
        terminal.json(found)
        return 0
    cached = found.device_tokens + found.host_tokens
    share = cached / max(found.prompt_tokens, 1)
    terminal.print(
        f"{cached} of {found.prompt_tokens} tokens cached ({share:.0%}): "
        f"{found.device_tokens} on the device, {found.host_tokens} on the host"
    )
    if found.partial_tokens:
        terminal.print(f"{found.partial_tokens} more begin a cached block, which a copy of it would serve")
    if found.block_ids:
        terminal.print(f"blocks {' '.join(map(str, found.block_ids))}")
    return 0


def blocks(args: argparse.Namespace, terminal: Terminal) -> int:
    """ListBlocks."""
    with connect(args) as client:
        found = client.list_blocks(args.start, args.limit, args.state)
    if args.json:
        terminal.json(found)
        return 0
    rows = [
        (b.block_id, b.state, b.ref_count, b.pins, b.block_hash[:16] or "-", b.parent_hash[:16] or "-")
        for b in found.blocks
    ]
    terminal.print(table(rows, ("block", "state", "refs", "pins", "hash", "parent")) if rows else "no such blocks")
    if found.next_start is not None:
        terminal.note(f"more with --start {found.next_start}")
    return 0


def block_table(args: argparse.Namespace, terminal: Terminal) -> int:
    """GetBlockTable."""
    with connect(args) as client:
        sequences = client.block_table(args.request_id)
    if args.json:
        terminal.json({"sequences": [{name: getattr(s, name) for name in s.__slots__} for s in sequences]})
        return 0
    for s in sequences:
        terminal.print(
            f"sequence {s.index}: {s.state}, {s.num_tokens} tokens, {s.computed_tokens} computed; "
            f"blocks {' '.join(map(str, s.block_ids)) or '-'}"
        )
    return 0


def reset_cache(args: argparse.Namespace, terminal: Terminal) -> int:
    """ResetPrefixCache."""
    with connect(args) as client:
        reset = client.reset_prefix_cache(force=args.force)
    if args.json:
        terminal.json(reset)
        return 0
    also = f"; {reset.preempted_sequences} sequences preempted, {reset.ended_pins} pins ended" if args.force else ""
    terminal.print(f"{reset.removed_blocks} blocks forgotten{also}")
    return 0


def abort(args: argparse.Namespace, terminal: Terminal) -> int:
    """Abort; exit status 1 when none of the requests was live."""
    with connect(args) as client:
        aborted = client.abort(*args.request_ids)
    if args.json:
        terminal.json({"aborted": aborted})
    else:
        terminal.print(f"aborted: {' '.join(aborted) or 'none was running'}")
    return 0 if aborted else 1


def tokenize(args: argparse.Namespace, terminal: Terminal) -> int:
    """Tokenize."""
    with connect(args) as client:
        ids = client.tokenize(args.text)
    if args.json:
        terminal.json({"token_ids": ids})
    else:
        terminal.print(",".join(map(str, ids)))
    return 0


def detokenize(args: argparse.Namespace, terminal: Terminal) -> int:
    """Detokenize."""
    with connect(args) as client:
        text = client.detokenize(args.token_ids)
    if args.json:
        terminal.json({"text": text})
    else:
        terminal.print(text)
    return 0
