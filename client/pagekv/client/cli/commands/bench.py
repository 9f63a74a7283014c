"""`pagekv bench`: measures a running stack under load."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from pagekv.client.aio import AsyncPageKVClient
from pagekv.client.cli.connection_flags import add_connection, client_of_flags
from pagekv.client.cli.parser import Subparsers, UsageError, add_command, add_flags
from pagekv.client.cli.stack_announcement import describe
from pagekv.client.cli.terminal import Terminal, milliseconds, table
from pagekv.client.errors import PageKVError
from pagekv.client.planning.load_test import (
    Diagnosis,
    LatencySpread,
    LoadReport,
    Objectives,
    Workload,
    make_jobs,
    run_jobs,
)
from pagekv.client.types import ModelInfo
from pagekv.common.flags import integer, number

EXAMPLES = """\
  pagekv bench --concurrency 16 --requests 64
  pagekv bench --rate 4 --requests 100 --prompt-tokens 64:256 --output-tokens 64
  pagekv bench --shared-prefix 512 --prompt-tokens 32 --output-tokens 32 --requests 32 --concurrency 32

The same --seed sends the same prompts, which are then cached already: for cold figures leave it out or give
--reset-cache. Times to first token and end to end count from when a request was due. The inter-token latency has
one value per token after the first; tokens that arrive together share the time since the message before.
"""
# Seconds between two lines of progress if there is no status line.
_PROGRESS_S = 2.0


def span(low: int, high: int) -> Callable[[str], tuple[int, int]]:
    """An argparse type: N or LO:HI within bounds."""
    check = integer(low, high)

    def parse(text: str) -> tuple[int, int]:
        first, colon, second = text.partition(":")
        bounds = check(first), check(second if colon else first)
        if bounds[0] > bounds[1]:
            raise argparse.ArgumentTypeError(f"must be N or LO:HI with LO not above HI, got {text!r}")
        return bounds

    return parse


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "bench", "measure a running stack under load", run, examples=EXAMPLES)
    add_connection(parser, timeout=None)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=integer(1, 4096),
        default=8,
        metavar="N",
        help="requests under way at any time (closed loop) [8]",
    )
    load.add_argument(
        "--rate",
        type=number(0.001, 1e5),
        metavar="R",
        help="instead of --concurrency: requests a second, with Poisson arrivals",
    )
    tokens, limit = span(1, 2**20), number(0.001, 1e7)
    add_flags(
        parser,
        ("requests", integer(1, 10**6), 64, "N", "requests to send [64]"),
        ("prompt-tokens", tokens, (64, 256), "LO:HI", "tokens of each prompt, without the shared prefix [64:256]"),
        ("output-tokens", tokens, (64, 64), "LO:HI", "tokens to generate for each request [64]"),
        ("shared-prefix", integer(0, 2**20), 0, "N", "tokens that all prompts begin with [0]"),
        ("text", Path, None, "FILE", "take prompts from this text instead of random token ids"),
        ("temperature", number(0, 100), 0.0, "X", "sampling temperature; 0 is greedy [0]"),
        ("seed", integer(0, 2**63 - 1), None, "N", "seed of the prompts, lengths and arrivals [random]"),
        ("max-ttft-ms", limit, 500.0, "MS", "objective: milliseconds to the first token [500]"),
        ("max-inter-token-ms", limit, 50.0, "MS", "objective: mean milliseconds between later tokens [50]"),
    )
    parser.add_argument("--reset-cache", action="store_true", help="remove every cached prefix first")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Raises PageKVError, after the report, when a request failed."""
    if args.rate is not None:
        args.concurrency = None
    if args.seed is None:
        args.seed = secrets.randbits(31)
    workload = Workload(**{each.name: getattr(args, each.name) for each in fields(Workload)})
    objectives = Objectives(args.max_ttft_ms, args.max_inter_token_ms)
    info, report = asyncio.run(_run(args, workload, objectives, terminal))
    if args.json:
        shown = asdict(workload) | {"shape": workload.shape()}
        terminal.json({"workload": shown, "model": info, "report": report})
    else:
        terminal.print(report_text(workload, info, report, objectives))
    if report.errors:
        failed = sum(report.errors.values())
        raise PageKVError(f"{failed} of {workload.requests} requests failed: {_errors_text(report)}")
    return 0


def _errors_text(report: LoadReport) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(report.errors.items())) or "0"


async def _run(
    args: argparse.Namespace, workload: Workload, objectives: Objectives, terminal: Terminal
) -> tuple[ModelInfo, LoadReport]:
    async with client_of_flags(AsyncPageKVClient, args) as client:
        info = await client.model_info()
        needed = workload.shared_prefix + workload.prompt_tokens[1] + workload.output_tokens[1]
        if needed > info.max_sequence_tokens:
            raise UsageError(
                f"the longest request needs {needed} tokens, and the server serves at most {info.max_sequence_tokens}"
            )
        text_ids = () if args.text is None else await client.tokenize(_read(args.text))
        try:
            jobs = make_jobs(workload, info.vocab_size, info.eos_token_ids, text_ids)
        except ValueError as error:
            raise UsageError(f"--text {args.text}: {error}") from error
        if args.reset_cache:
            await client.reset_prefix_cache()
        if not args.json:
            terminal.note(f"sending {workload.shape()}")
        begun = said = time.perf_counter()

        def show(done: int, tokens: int) -> None:
            nonlocal said
            now = time.perf_counter()
            rate = tokens / (now - begun)
            terminal.progress(done, workload.requests, f"{rate:.0f} tok/s")
            # A pipe has no status line.
            if not (args.json or terminal.err_is_terminal) and now - said >= _PROGRESS_S:
                said = now
                terminal.note(f"{done} of {workload.requests} requests after {now - begun:.0f} s, {rate:.0f} tok/s")

        report = await run_jobs(client, workload, jobs, show, objectives)
    terminal.clear()
    return info, report


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error


def report_text(workload: Workload, info: ModelInfo, report: LoadReport, objectives: Objectives) -> str:
    latencies = [
        (name, *_cells(spread))
        for name, spread in (
            ("time to first token", report.ttft_s),
            ("inter-token latency", report.inter_token_s),
            ("end to end", report.total_s),
        )
    ]
    rates = [
        ("throughput", f"{report.output_tokens_per_s:.1f} output tok/s, {report.total_tokens_per_s:.1f} with prompts, "
                       f"{report.requests_per_s:.2f} requests/s"),
        ("prefix cache", f"{report.hit_rate:.1%} hits: {report.cached_tokens} of {report.prompt_tokens} prompt tokens"),
        ("requests", f"{report.completed} in {report.seconds:.2f} s, {report.output_tokens} tokens generated"),
        ("errors", _errors_text(report)),
    ]  # fmt: skip  # laid out as a table
    head = [("workload", workload.shape()), ("stack", describe(info))]
    tables = (table(head), table(latencies, ("", "p50", "p90", "p99", "mean", "max")), table(rates))
    return "\n\n".join((*tables, "\n".join(verdict(workload, report, objectives))))


def verdict(workload: Workload, report: LoadReport, objectives: Objectives) -> list[str]:
    """Sentences that say whether the objectives were met and, if not, by how much they were missed and the likely
    cause.
    """
    bounds = f"first token within {objectives.ttft_ms:g} ms, then {objectives.inter_token_ms:g} ms a token"
    judged = sum(report.diagnoses.values())
    late, slow = (report.diagnoses.get(each.value, 0) for each in (Diagnosis.PREFILL, Diagnosis.DECODE))
    if not judged:
        return []
    if not late + slow:
        return [f"{judged} of {judged} requests met the objectives: {bounds}."]
    less = "a lower --rate" if workload.rate is not None else "a lower --concurrency"
    lines = []
    if late and report.ttft_s is not None:
        lines.append(
            f"{late} of {judged} requests missed the objective for the first token: up to "
            f"{milliseconds(report.ttft_s.max)}, bound {objectives.ttft_ms:g}; likely cause: they waited for a place "
            f"in the batch, or for long prompts to be computed (to check, try {less}, shorter prompts or "
            "--shared-prefix)"
        )
    if slow and report.inter_token_s is not None:
        lines.append(
            f"{slow} of {judged} requests missed the objective between tokens: "
            f"{milliseconds(report.inter_token_s.mean)} on average over all, bound {objectives.inter_token_ms:g}; "
            f"likely cause: steps are slow because many sequences share them, or blocks run out and requests are "
            f"preempted (to check, try {less}; pagekv stats counts preemptions)"
        )
    if judged - late - slow:
        lines.append(f"{judged - late - slow} of {judged} met both.")
    return lines


def _cells(spread: LatencySpread | None) -> tuple[str, ...]:
    values = asdict(spread).values() if spread is not None else [None] * 5
    return tuple(milliseconds(value) for value in values)
