"""The worth of prefixes, blocks and batches, on the whole stack with the demo model on the CPU.

Four tables: time to first token and requests a second by the share of a
prompt that is cached; what prefix caching costs where nothing is ever hit; block sizes; tokens a second by batch.
Every figure is the median of `--rounds`; rounds of what is compared alternate, because machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.stack import running_stack

from pagekv.client import AsyncPageKVClient
from pagekv.client.cli.terminal import table
from pagekv.client.planning.load_test import LoadReport, Workload, make_jobs, run_jobs

EXECUTOR = ("--model", "demo", "--dtype", "float32", "--threads", "1", "--kv-memory", "512MiB")
PROMPT = 512
SEEDS = itertools.count(1)  # a new workload each time, so that nothing is cached but what is meant to be

Row = dict[str, Any]


def note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


async def measure(target: str, requests: int, at_once: int, shared: int, own: int, output: int) -> LoadReport:
    """One closed loop; with the shared prefix computed by a request before it."""
    workload = Workload(requests + 1, at_once, None, (own, own), (output, output), shared, 0.0, next(SEEDS))
    async with AsyncPageKVClient(target) as client:
        info = await client.model_info()
        first, *jobs = make_jobs(workload, info.vocab_size, info.eos_token_ids)
        if shared:
            await run_jobs(client, workload, [first])
        report = await run_jobs(client, workload, jobs)
    assert not report.errors, report.errors
    return report


def once(target: str, requests: int, at_once: int, shared: int, own: int, output: int) -> LoadReport:
    return asyncio.run(measure(target, requests, at_once, shared, own, output))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def by_hit_share(rounds: int) -> list[Row]:
    """Prompts of 512 tokens of which a share is cached (in the last row all but the one that is always computed)."""
    rows = []
    with running_stack(EXECUTOR) as stack:
        once(stack.target, 4, 4, 0, PROMPT, 4)  # what is done for the first time costs more
        for percent in (0, 25, 50, 75, 100):
            note(f"{percent} % of the prompt cached")
            shared = PROMPT * percent // 100
            own = max(1, PROMPT - shared)
            alone = [once(stack.target, 8, 1, shared, own, 1) for _ in range(rounds)]
            many = [once(stack.target, 32, 8, shared, own, 16) for _ in range(rounds)]
            rows.append(
                {
                    "cached": f"{percent} %",
                    "hit rate": f"{median([r.hit_rate for r in alone]):.1%}",
                    "TTFT alone, ms": round(median([r.ttft_s.p50 * 1e3 for r in alone if r.ttft_s]), 1),
                    "requests/s, 8 at once": round(median([r.requests_per_s for r in many]), 2),
                }
            )
    return rows


def without_hits(rounds: int) -> list[Row]:
    """The same cold prompts with and without the prefix cache: what hashing and publishing cost in the end."""
    seconds: dict[str, list[float]] = {"--prefix-cache": [], "--no-prefix-cache": []}
    with ExitStack() as both:
        stacks = {flag: both.enter_context(running_stack(EXECUTOR, [flag])) for flag in seconds}
        for stack in stacks.values():
            once(stack.target, 4, 4, 0, PROMPT, 4)  # what is done for the first time costs more
        for number in range(rounds):
            note(f"no hits, round {number + 1} of {rounds}")
            for flag in sorted(seconds, reverse=bool(number % 2)):
                seconds[flag].append(once(stacks[flag].target, 24, 8, 0, PROMPT, 4).seconds)
    on, off = (median(seconds[flag]) for flag in seconds)
    each = [a / b for a, b in zip(*seconds.values(), strict=True)]
    return [
        {"prefix cache": "on", "seconds": round(on, 2), "ratio, median of rounds": f"{median(each):.3f}"},
        {"prefix cache": "off", "seconds": round(off, 2), "ratio, median of rounds": ""},
    ]


async def utilization(target: str) -> float:
    """Filled share of the slots in held blocks, seen while 16 requests of 100 prompt tokens run."""
    async with AsyncPageKVClient(target) as client:
        info = await client.model_info()
        workload = Workload(16, 16, None, (100, 100), (64, 64), 0, 0.0, next(SEEDS))
        jobs = make_jobs(workload, info.vocab_size, info.eos_token_ids)
        running = asyncio.create_task(run_jobs(client, workload, jobs))
        seen = []
        while not running.done():
            stats = await client.stats()
            if stats.running_sequences == 16:
                seen.append(stats.utilization)
            await asyncio.sleep(0.02)
        await running
    return median(seen) if seen else float("nan")


def by_block_size(rounds: int) -> list[Row]:
    """A shared prefix of 300 tokens, which ends inside of a block of any size but 1, 2 and 4."""
    rows = []
    for size in (1, 4, 16, 64, 256):
        note(f"blocks of {size}")
        cells: Row = {"block size": size}
        for name, flags in (("hit rate", []), ("hit rate, full blocks only", ["--no-partial-hits"])):
            with running_stack(EXECUTOR, ["--block-size", str(size), *flags]) as stack:
                reports = [once(stack.target, 32, 8, 300, 100, 16) for _ in range(rounds)]
                cells[name] = f"{median([r.hit_rate for r in reports]):.1%}"
                if not flags:
                    cells["output tok/s"] = round(median([r.output_tokens_per_s for r in reports]), 1)
                    cells["slots filled"] = f"{asyncio.run(utilization(stack.target)):.1%}"
        rows.append(cells)
    return rows


def by_batch(rounds: int) -> list[Row]:
    """Tokens a second by requests at once: decodes share every read of the weights, until the arithmetic fills up."""
    rows: list[Row] = []
    with running_stack(EXECUTOR) as stack:
        for at_once in (1, 2, 4, 8, 16, 32, 64):
            note(f"{at_once} at once")
            reports = [once(stack.target, max(4, at_once), at_once, 0, 32, 32) for _ in range(rounds)]
            speed = median([r.output_tokens_per_s for r in reports])
            gap = median([r.inter_token_s.p50 * 1e3 for r in reports if r.inter_token_s])
            times = speed / rows[0]["output tok/s"] if rows else 1.0
            rows.append(
                {
                    "at once": at_once,
                    "output tok/s": round(speed, 1),
                    "times one": f"{times:.1f}",
                    "inter-token, ms": round(gap, 1),
                }
            )
    return rows


TABLES = {
    "hits": ("Prompts of 512 tokens by their cached share", by_hit_share),
    "no-hits": ("24 cold prompts of 512 tokens", without_hits),
    "blocks": ("Block sizes: prompts of 100 tokens behind a shared prefix of 300", by_block_size),
    "batch": ("Requests at once: 32 prompt tokens, 32 output tokens", by_batch),
}


def main() -> None:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each figure [3]")
    parser.add_argument("--only", choices=TABLES, action="append", metavar="NAME", help=f"one of {', '.join(TABLES)}")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    args = parser.parse_args()
    results = {}
    for name in args.only or TABLES:
        title, run = TABLES[name]
        note(title)
        results[name] = run(args.rounds)
        if not args.json:
            rows = [tuple(str(value) for value in row.values()) for row in results[name]]
            print(f"\n{title}\n\n{table(rows, tuple(results[name][0]))}", flush=True)
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
