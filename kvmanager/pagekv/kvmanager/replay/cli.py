"""The command line of a replay. Exit status 0: done, 1: it failed (one line says why), 2: wrong usage, 130: Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pagekv.common.flags import FlagParser, integer, number, power_of_two
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE
from pagekv.kvmanager.replay.cache_mode import replay_cache
from pagekv.kvmanager.replay.cost_model import StepCost
from pagekv.kvmanager.replay.options import MODES, POLICIES, ReplayOptions
from pagekv.kvmanager.replay.plot import svg
from pagekv.kvmanager.replay.progress import Progress
from pagekv.kvmanager.replay.report import as_json, as_table
from pagekv.kvmanager.replay.step_replay import StepsError, is_recording_of_steps, replay_steps
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
_MAX_BLOCKS = 2**31 - 1
_EPILOG = """\
examples:
  pagekv replay conversation_trace.jsonl --blocks 20000,40000,80000,all
  pagekv replay conversation_trace.jsonl --blocks 40000 --policy slru,lru,none --speed 0.5
  pagekv replay conversation_trace.jsonl --mode cache --plot hits.svg
  pagekv replay AzureLLMInferenceTrace_conv.csv --blocks 2000,4000 --json
  pagekv replay --steps recording

In cache mode a prompt's partial last block counts as a block; --full-blocks counts full ones only, as timed mode does.
"""


def _listed(check: Callable[[str], object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        for part in parts:
            check(part)
        return list(dict.fromkeys(parts))

    return parse


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
    """Flags of `pagekv replay`. No environment variables: a figure must not depend on what nobody sees."""
    parser = FlagParser(
        PROG,
        "Replays a recorded workload on the real scheduler and block pool, without a model: hit rates, evictions, "
        "preemptions, utilisation and simulated latencies, one row per policy and capacity.",
        env={},
    )
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)
    parser.epilog = _EPILOG
    parser.add_argument(
        "trace", type=Path, nargs="?", metavar="TRACE", help="Mooncake JSONL or Azure LLM inference CSV"
    )
    parser.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="instead of a trace: a recording of pagekv-manager --record-steps; every decision is derived again and "
        "compared, and nothing else applies but --json",
    )
    parser.flag("format", "what TRACE is", default="auto", choices=FORMATS)
    parser.flag(
        "mode",
        "timed: requests arrive by timestamp and are batched; cache: prompts one at a time in file order, hits only",
        default="timed",
        choices=MODES,
    )
    parser.add_argument(
        "--blocks",
        type=_listed(_capacity),
        default=["all"],
        metavar="LIST",
        help="capacities in blocks, such as 1000,2000,all; all: a pool that never evicts [all]",
    )
    parser.add_argument(
        "--policy",
        type=_listed(_policy),
        default=[DEFAULT_POLICY],
        metavar="LIST",
        help=f"slru, lru: the manager's eviction policies; none: without the prefix cache [{DEFAULT_POLICY}]",
    )
    parser.flag(
        "protected-share",
        "share of the pool, 0 to 1, that slru protects at most",
        default=DEFAULT_PROTECTED_SHARE,
        type=number(0, 1),
        metavar="SHARE",
    )
    parser.add_argument(
        "--block-size",
        type=power_of_two(1, 4096),
        metavar="TOKENS",
        help="tokens in a block [16; in cache mode what a hash id covers]",
    )
    parser.add_argument(
        "--tokens-per-id",
        type=power_of_two(1, 4096),
        metavar="TOKENS",
        help=f"prompt tokens behind one hash id [what the trace says, else {DEFAULT_TOKENS_PER_ID}]",
    )
    parser.add_argument("--limit", type=integer(1, 10**9), metavar="N", help="the first N requests only")
    parser.add_argument("--full-blocks", action="store_true", help="cache mode: count and cache full blocks only")
    timed = parser.add_argument_group("timed mode")
    _add_number(timed, "speed", "arrivals come so many times as fast", 1.0, 1e-6, 1e6, "X")
    timed.add_argument(
        "--max-batch-tokens",
        type=integer(1, 65536),
        default=2048,
        metavar="TOKENS",
        help="tokens computed in one step at most [2048]",
    )
    timed.add_argument(
        "--max-running", type=integer(1, 65536), default=256, metavar="N", help="sequences in steps at most [256]"
    )
    _add_number(timed, "watermark", "share of the pool that admission leaves free", 0.01, 0, 0.5, "SHARE")
    timed.add_argument(
        "--pipeline-depth", type=integer(1, 2), default=2, metavar="N", help="steps planned ahead, 1 or 2 [2]"
    )
    cost = parser.add_argument_group(
        "cost of a simulated step, a sum (defaults: an 8B model in bfloat16 on one 80 GB accelerator, by data sheet)"
    )
    default = StepCost()
    _add_number(cost, "step-ms", "every step that computes anything", default.step_ms, 0, 1e6, "MS")
    _add_number(cost, "prefill-us", "each prompt token computed", default.prefill_us, 0, 1e6, "US")
    _add_number(cost, "decode-us", "each sequence that decodes", default.decode_us, 0, 1e6, "US")
    _add_number(cost, "kv-read-ns", "each token of context attended to", default.kv_read_ns, 0, 1e6, "NS")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON on standard output, times in seconds")
    output.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw hit rates, and times to first token")
    return parser


def _add_number(
    group: argparse._ArgumentGroup, name: str, help: str, default: float, low: float, high: float, metavar: str
) -> None:
    group.add_argument(
        f"--{name}", type=number(low, high), default=default, metavar=metavar, help=f"{help} [{default:g}]"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m pagekv.kvmanager.replay`."""
    parser = make_parser()
    args = parser.parse(argv)
    if (args.trace is None) == (args.steps is None):
        parser.error("give either a TRACE or --steps FILE")
    if args.steps is not None:
        return _replay_steps(args.steps, args.json)
    try:
        if is_recording_of_steps(args.trace):
            sys.stderr.write(f"{PROG}: {args.trace}: looks like a recording of steps; add --steps before its name\n")
            return 1
        tokens_per_id = args.tokens_per_id or block_size_of(args.trace) or DEFAULT_TOKENS_PER_ID
    except OSError as error:
        sys.stderr.write(f"{PROG}: {args.trace}: {error.strerror or error}\n")
        return 1
    options = ReplayOptions(
        block_size=args.block_size or (tokens_per_id if args.mode == "cache" else 16),
        tokens_per_id=tokens_per_id,
        partial_blocks=args.mode == "cache" and not args.full_blocks,
        protected_share=args.protected_share,
        speed=args.speed,
        max_batch_tokens=args.max_batch_tokens,
        max_running=args.max_running,
        watermark=args.watermark,
        pipeline_depth=args.pipeline_depth,
        cost=StepCost(args.step_ms, args.prefill_us, args.decode_us, args.kv_read_ns),
    )
    try:
        records = read_trace(args.trace, args.format, tokens_per_id, args.limit)
        if args.mode == "cache" and not all(record.hash_ids for record in records):
            raise TraceError(f"{args.trace}: has no hash ids, so no prompt shares anything; use --mode timed")
        if args.plot is not None:
            # Refused now rather than after minutes of replay.
            args.plot.open("a").close()
        _replay(args, options, records)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    except MemoryError:
        sys.stderr.write(f"{PROG}: not enough memory for a pool of this size; ask for fewer blocks with --blocks\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    return 0


def _replay_steps(path: Path, as_json: bool) -> int:
    try:
        report = replay_steps(path)
    except (StepsError, OSError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    if as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        return 0
    end = "" if report.complete else "; the recording breaks off in the middle of a record"
    sys.stdout.write(
        f"{report.steps:,} steps for {report.requests:,} requests in {report.epochs:,} epochs, with "
        f"{report.preemptions:,} preemptions: every decision was derived again, and is the same{end}\n"
    )
    return 0


def _replay(args: argparse.Namespace, options: ReplayOptions, records: list[TraceRecord]) -> None:
    replay = replay_cache if args.mode == "cache" else replay_timed
    pairs = [(policy, capacity) for policy in args.policy for capacity in args.blocks]
    progress = Progress(sys.stderr, len(pairs), len(records))
    rows = []
    try:
        for index, (policy, capacity) in enumerate(pairs):
            label = f"{policy}, {capacity} blocks"

            def show(done: int, index: int = index, label: str = label) -> None:
                progress.show(index, label, done)

            rows.append(replay(records, options, policy, _capacity(capacity), show))
    finally:
        progress.clear()
    if args.json:
        report = json.dumps(as_json(str(args.trace), args.mode, options, rows))
    else:
        head = f"{args.trace.name}, {args.mode} mode: {len(records):,} requests, blocks of {options.block_size} tokens"
        report = f"{head}\n\n{as_table(rows)}"
    if args.plot is not None:
        args.plot.write_text(svg(f"{args.trace.name}, blocks of {options.block_size} tokens", rows), encoding="utf-8")
    try:
        sys.stdout.write(report + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has gone. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
