"""The command line of a replay. Exit status 0: done, 1: failed (one line says why), 2: wrong usage, 130: Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pagekv.common.error_line import FAILED, error_line
from pagekv.common.flags import FlagParser, add_flags, from_args, help_width, integer, number, power_of_two
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE
from pagekv.kvmanager.replay.cache_mode import replay_cache
from pagekv.kvmanager.replay.options import MODES, POLICIES, ReplayOptions, TimedOptions
from pagekv.kvmanager.replay.report import as_json, as_table, draw
from pagekv.kvmanager.replay.step_replay import StepsError, is_recording_of_steps, replay_steps
from pagekv.kvmanager.replay.tenants_replay import replay_tenants, tenants_as_json, tenants_as_table
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import (
    DEFAULT_TOKENS_PER_ID,
    FORMATS,
    TraceError,
    TraceRecord,
    block_size_of,
    read_trace,
)

PROG = "pagekv replay"
# Positions in free queues fit int32 even if the whole pool is protected, see `engine/sizing.py`.
_MAX_BLOCKS = 2**29
_Value = TypeVar("_Value")
_EPILOG = """\
examples:
  pagekv replay conversation_trace.jsonl --blocks 20000,40000,80000,all
  pagekv replay conversation_trace.jsonl --blocks 40000 --policy slru,lru,none --speed 0.5
  pagekv replay conversation_trace.jsonl --mode cache --plot hits.svg
  pagekv replay AzureLLMInferenceTrace_conv.csv --blocks 2000,4000 --json
  pagekv replay conversation_trace.jsonl --block-size 512 --blocks 20000 --tenants 4
  pagekv replay --steps recording

In cache mode a prompt's partial last block counts as a block; --full-blocks counts full ones only, as timed mode does.
"""


def _listed(read: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """A type for lists of values with commas between them, without repetitions."""
    return lambda text: list(dict.fromkeys(read(part.strip()) for part in text.split(",")))


def _capacity(text: str) -> int | None:
    """Blocks, or None for `all`."""
    if text == "all":
        return None
    try:
        return integer(1, _MAX_BLOCKS)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"each {error}; or all, which never evicts") from error


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"each must be one of {', '.join(POLICIES)}, got {text!r}")
    return text


def make_parser() -> FlagParser:
    """Flags of `pagekv replay`. It reads no environment variables: a figure must follow from its command line."""
    parser = FlagParser(
        PROG,
        "Replay a recorded workload on the real scheduler and block pool, without a model: hit rates, evictions,\n"
        "preemptions, utilisation and simulated latencies, one row per policy and capacity.",
        env={},
    )
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=30, width=help_width()
    )
    parser.epilog = _EPILOG
    add, flag = parser.add_argument, parser.flag
    add("trace", type=Path, nargs="?", metavar="TRACE", help="Mooncake JSONL or Azure LLM inference CSV")
    add(
        "--steps",
        type=Path,
        metavar="FILE",
        help="instead of a trace: a recording of pagekv-manager --record-steps; every decision is derived again and "
        "compared; of the other flags only --json applies",
    )
    flag("format", "format of TRACE", default="auto", choices=FORMATS)
    flag(
        "mode",
        "timed: requests arrive by timestamp and are batched; cache: prompts one at a time in file order, hits only",
        default="timed",
        choices=MODES,
    )
    flags: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
        ("blocks", _listed(_capacity), "all", "LIST",
         "capacities in blocks, such as 1000,2000,all; all: a pool that never evicts"),
        ("policy", _listed(_policy), DEFAULT_POLICY, "LIST",
         "slru, lru: the manager's eviction policies; none: without the prefix cache"),
        ("protected-share", number(0, 1), DEFAULT_PROTECTED_SHARE, "SHARE",
         "most of the pool that slru protects, a share from 0 to 1"),
        ("block-size", power_of_two(1, 4096), None, "TOKENS",
         "tokens in one block [16; in cache mode --tokens-per-id]"),
        ("tokens-per-id", power_of_two(1, 4096), None, "TOKENS",
         f"prompt tokens for which one hash id stands [as the trace says, else {DEFAULT_TOKENS_PER_ID}]"),
        ("limit", integer(1, 10**9), None, "N", "replay only the first N requests"),
        ("tenants", integer(2, 1000), None, "N",
         "timed mode: share the requests out among N tenants, and compare the hits and waits of the first, a quiet "
         "one, alone and beside the others"),
    )  # fmt: skip  # laid out as a table
    for name, kind, default, metavar, text in flags:
        flag(name, text, default=default, type=kind, metavar=metavar)
    add("--full-blocks", action="store_true", help="cache mode: count and cache full blocks only")
    add_flags(parser, TimedOptions, "timed mode")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON on standard output, times in seconds")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="also draw hit rates, and times to first token (needs pagekv[plot]); FILE.png and FILE.pdf too",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser, given = make_parser(), list(sys.argv[1:] if argv is None else argv)
    parser.as_json = "--json" in given
    args = parser.parse(given)
    if (args.trace is None) == (args.steps is None):
        parser.error("give either a TRACE or --steps FILE")
    if args.tenants is not None and (args.mode == "cache" or args.plot is not None):
        parser.error("--tenants: needs --mode timed, and no --plot")
    try:
        if args.steps is not None:
            _replay_steps(args.steps, args.json)
        else:
            _replay_trace(args)
    except (StepsError, TraceError) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except MemoryError:
        reason = "not enough memory for a pool of this size; ask for fewer blocks with --blocks"
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    else:
        return 0
    sys.stderr.write(f"{error_line(FAILED, reason) if args.json else f'{PROG}: {reason}'}\n")
    return 1


def _replay_steps(path: Path, as_json: bool) -> None:
    report = replay_steps(path)
    if as_json:
        _print(json.dumps(asdict(report)))
        return
    end = "" if report.complete else "; the recording breaks off in the middle of a record"
    steps, requests, epochs, preemptions = (
        f"{number:,} {noun}{'s' * (number != 1)}"
        for number, noun in (
            (report.steps, "step"),
            (report.requests, "request"),
            (report.epochs, "epoch"),
            (report.preemptions, "preemption"),
        )
    )
    _print(
        f"{steps} for {requests} in {epochs}, with {preemptions}: every decision was derived again and is the same{end}"
    )


def _replay_trace(args: argparse.Namespace) -> None:
    """Raises TraceError, OSError and MemoryError."""
    if is_recording_of_steps(args.trace):
        raise TraceError(f"{args.trace}: looks like a recording of steps; add --steps before its name")
    tokens_per_id = args.tokens_per_id or block_size_of(args.trace) or DEFAULT_TOKENS_PER_ID
    options = from_args(
        ReplayOptions,
        args,
        block_size=args.block_size or (tokens_per_id if args.mode == "cache" else 16),
        tokens_per_id=tokens_per_id,
        partial_blocks=args.mode == "cache" and not args.full_blocks,
        protected_share=args.protected_share,
    )
    records = read_trace(args.trace, args.format, tokens_per_id, args.limit)
    if args.mode == "cache" and not all(record.hash_ids for record in records):
        raise TraceError(f"{args.trace}: has no hash ids, so no prompt shares anything; use --mode timed")
    if args.plot is not None:
        # Checked now and not after minutes of replay.
        if find_spec("matplotlib") is None:
            raise TraceError("--plot needs matplotlib: pip install 'pagekv[plot]'")
        args.plot.open("a").close()
    (_replay if args.tenants is None else _replay_tenants)(args, options, records)


def _replay_tenants(args: argparse.Namespace, options: ReplayOptions, records: list[TraceRecord]) -> None:
    rows = []
    for policy in args.policy:
        for capacity in args.blocks:
            label = f"{policy}, {capacity or 'all'} blocks"
            rows += replay_tenants(records, options, policy, capacity, args.tenants, _progress(label, len(records)))
    if args.json:
        _print(json.dumps(tenants_as_json(str(args.trace), options, args.tenants, rows)))
        return
    _print(f"{_head(args, options, records)}\n{tenants_as_table(args.tenants, rows)}")


def _replay(args: argparse.Namespace, options: ReplayOptions, records: list[TraceRecord]) -> None:
    replay = replay_cache if args.mode == "cache" else replay_timed
    pairs = [(policy, capacity) for policy in args.policy for capacity in args.blocks]
    rows = []
    for number_of_row, (policy, capacity) in enumerate(pairs, 1):
        show = _progress(f"{policy}, {capacity or 'all'} blocks ({number_of_row} of {len(pairs)})", len(records))
        rows.append(replay(records, options, policy, capacity, show))
        show(len(records))
    if args.json:
        report = json.dumps(as_json(str(args.trace), args.mode, options, rows))
    else:
        report = f"{_head(args, options, records)}\n\n{as_table(rows)}"
    if args.plot is not None:
        draw(args.plot, f"{args.trace.name}, blocks of {options.block_size} tokens", rows)
    _print(report)


def _head(args: argparse.Namespace, options: ReplayOptions, records: list[TraceRecord]) -> str:
    return f"{args.trace.name}, {args.mode} mode: {len(records):,} requests, blocks of {options.block_size} tokens"


def _print(report: str) -> None:
    try:
        sys.stdout.write(report + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has gone. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _progress(label: str, records: int) -> Callable[[int], None]:
    """Shows on a terminal how many records of a row are done."""
    if not sys.stderr.isatty():
        return lambda done: None

    def show(done: int) -> None:
        sys.stderr.write(f"\r{label}: {done:,} of {records:,} requests" + "\n" * (done == records))
        sys.stderr.flush()

    return show
