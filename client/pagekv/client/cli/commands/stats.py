"""`pagekv stats`: the KV pool, the prefix cache and the load, in figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pagekv.client.cli.commands import top
from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.keypress import pause
from pagekv.client.cli.parser import Subparsers, add_command
from pagekv.client.cli.terminal import Terminal, counted, table
from pagekv.client.types import Stats
from pagekv.common.flags import number

# Share of held blocks above which the pool is reported as too small.
HIGH_USAGE = 0.8
EXAMPLES = """\
  pagekv stats
  pagekv stats --json | jq .prefix_hit_rate
  pagekv stats --json --watch 5
"""


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "stats", "show the KV pool, the prefix cache and the load", stats, examples=EXAMPLES)
    add_connection(parser)
    seconds = number(0.1, 3600)
    parser.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=seconds,
        metavar="S",
        help="repeat every S seconds until Ctrl-C: as pagekv top, or with --json as JSON [1]",
    )


def stats(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the statistics. With --watch it does the same as `pagekv top`, or prints JSON repeatedly."""
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
    busy, idle = now.executor_busy_us_total, now.executor_idle_us_total
    # Held blocks cannot be evicted, so little is left for eviction.
    warning = "; above 80% new requests preempt others instead of evicting cached blocks"
    pressure = warning if now.kv_usage > HIGH_USAGE else ""
    # Without active blocks there is no utilisation to show.
    filled = f"{now.utilization:.1%}" if now.active_blocks else "-"
    groups = {
        "KV pool": [
            ("blocks", f"{now.num_device_blocks} of {now.block_size} tokens"),
            ("in use", f"{now.active_blocks} ({now.kv_usage:.1%}), slots filled {filled}{pressure}"),
            ("pinned", f"{now.pinned_blocks} by {counted(now.pins, 'pin')}"),
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
            ("hash alarms", f"{now.hash_alarms_total} digests that stood for other tokens (collision, faulty memory)"),
        ],
        "load": [
            ("sequences", f"{now.running_sequences} running, {now.waiting_sequences} waiting"
                          + (f", {now.unread_sequences} ended and unread" if now.unread_sequences else "")),
            ("requests", f"{now.requests_total}, {now.aborted_requests_total} aborted, "
                         f"{now.rejected_requests_total} refused, {now.failed_requests_total} failed"),
            ("generated", f"{now.generated_tokens_total} tokens"),
            ("computed", f"{now.computed_tokens_total} tokens in {now.steps_total} steps"),
            ("preemptions", f"{now.preemptions_total}, {now.swap_preemptions_total} of them by swap"),
            ("executor", ("attached" if now.executor_attached else "NOT ATTACHED")
                         + (f", {counted(now.executor_threads, 'thread')}" if now.executor_threads else "")
                         + f", busy {busy / max(busy + idle, 1):.1%}"
                         + f", {counted(now.executor_restarts_total, 'restart')}"),
            *([("CUDA graphs", graphs_text(now.executor_graphs, now.executor_failed_graphs))]
              if now.executor_graphs or now.executor_failed_graphs else []),
            *([("ranks", ranks_text(now.executor_rank_us, now.executor_rank_differences_total))]
              if now.executor_rank_us else []),
        ],
    }  # fmt: skip  # laid out as a table
    return "\n".join(f"{terminal.bold(name)}\n{table(rows, indent='  ')}" for name, rows in groups.items())


def graphs_text(recorded: int, failed: int) -> str:
    trouble = (
        f", {failed} FAILED: steps of these shapes run without a graph, slower; the executor's log says why"
        if failed
        else ""
    )
    return f"{recorded} recorded{trouble}"


def ranks_text(rank_us: Sequence[int], differences: int) -> str:
    """A line about the ranks of an executor: the time of each rank for a step, and the slowest rank."""
    times = " ".join(f"{us / 1e3:.2f}" for us in rank_us)
    slowest = max(range(len(rank_us)), key=rank_us.__getitem__)
    skew = (max(rank_us) - min(rank_us)) / 1e3
    differed = f", differed {counted(differences, 'time')}" if differences else ""
    return f"{len(rank_us)}: {times} ms a step, rank {slowest} the slowest, skew {skew:.2f} ms{differed}"
