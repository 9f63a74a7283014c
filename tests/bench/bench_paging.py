"""The worth of paging, of the size of a block and of the size of the pool: recorded lengths on the real scheduler.

Three tables. Reserved: the memory of a sequence's longest context is taken at once, which is what paging with blocks
of that length does, against blocks of 16 tokens in the same memory. Blocks: sizes from 1 to 256 on prompts whose
common prefixes end anywhere. Batch: how many sequences run at once, and what they yield, by the size of the pool.

Steps take simulated time (`pagekv replay --help` has the costs), so counts, shares and ratios are the same on every
machine; only the manager's own time is measured. Lengths and arrivals: the samples of two Azure traces, or whole files.
Exit status 1: blocks of 16 tokens are filled to less than 96 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagekv.client.cli.terminal import table
from pagekv.kvmanager.replay.options import ReplayOptions
from pagekv.kvmanager.replay.report import Row, StepTiming
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord, read_trace

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"
LENGTHS = (TRACES / "azure_sample.csv", TRACES / "azure_code_sample.csv")
# The bar of the literature: less than 4 % of the memory is wasted (PagedAttention, SOSP 2023).
BAR = 0.96
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = ("utilised", "prompt tokens hit", "in full blocks", "slots unused")

Cells = dict[str, Any]


def replay(records: Sequence[TraceRecord], block_size: int, tokens: int, speed: float) -> tuple[Row, StepTiming]:
    """Requests in a pool of `tokens` slots in blocks of `block_size`, arrivals `speed` times as fast. A hash id stands
    for one token.
    """
    options = ReplayOptions(block_size=block_size, tokens_per_id=1, partial_blocks=False, speed=speed)
    row = replay_timed(records, options, "slru", tokens // block_size, lambda done: None)
    assert row.timing is not None
    assert row.timing.utilisation is not None
    assert row.timing.refused == 0, "the pool is smaller than a request"
    return row, row.timing


def longest(records: Sequence[TraceRecord]) -> int:
    """The least power of two that every request of the trace fits in: the context that a reservation is made for."""
    return 1 << (max(record.input_length + record.output_length for record in records) - 1).bit_length()


def reserved_against_paged(records: Sequence[TraceRecord], contexts: int, speed: float) -> list[Cells]:
    """The memory of `contexts` full contexts, reserved whole and in blocks of 16."""
    context = longest(records)
    rows: list[Cells] = []
    for name, size in ((f"reserved, {context} tokens each", context), ("paged, blocks of 16", 16)):
        _, timing = replay(records, size, contexts * context, speed)
        yielded = timing.output_tokens / timing.simulated_s
        rows.append(
            {
                "memory": name,
                "utilised": timing.utilisation,
                "decodes a step": timing.output_tokens / timing.steps,
                "output tok/s": yielded,
                "first token, s": timing.ttft_s.p50 if timing.ttft_s else 0.0,
                "times the first": yielded / rows[0]["output tok/s"] if rows else 1.0,
                "preempted": timing.preemptions,
            }
        )
    return rows


def with_prefixes(requests: int = 400) -> list[TraceRecord]:
    """Requests behind 20 system prompts of 50 to 1,000 tokens, each with a question of its own and a short answer."""
    rng = random.Random(5)
    fresh = iter(range(2**29))
    prompts = [[next(fresh) for _ in range(rng.randint(50, 1000))] for _ in range(20)]
    records = []
    for number in range(requests):
        ids = (*rng.choice(prompts), *(next(fresh) for _ in range(rng.randint(10, 200))))
        records.append(TraceRecord(number / 20, len(ids), rng.randint(10, 100), ids))
    return records


def by_block_size() -> list[Cells]:
    """The manager's time counts everything that a replay does, the simulated executor included."""
    rows: list[Cells] = []
    for size in BLOCK_SIZES:
        # As large as all prefixes and the running requests, not as everything that was ever cached.
        records = with_prefixes()
        begun = time.process_time()
        row, timing = replay(records, size, 2**15, 1.0)
        taken = time.process_time() - begun
        rows.append(
            {
                "block size": size,
                "prompt tokens hit": row.token_hit_rate,
                "in full blocks": row.hit_blocks * size / row.prompt_tokens,
                "slots unused": 1 - (timing.utilisation or 0.0),
                "blocks at most": timing.peak_blocks,
                "manager, CPU us a step": taken / timing.steps * 1e6,
            }
        )
    return rows


def by_batch(records: Sequence[TraceRecord], speed: float) -> list[Cells]:
    """Pools from the longest request's to ones that never fill."""
    context = longest(records)
    rows: list[Cells] = []
    for contexts in (1, 2, 4, 8, 16, 32):
        row, timing = replay(records, 16, contexts * context, speed)
        yielded = timing.output_tokens / timing.simulated_s
        rows.append(
            {
                "blocks": row.blocks,
                "decodes a step": timing.output_tokens / timing.steps,
                "output tok/s": yielded,
                "times the first": yielded / rows[0]["output tok/s"] if rows else 1.0,
                "preempted": timing.preemptions,
            }
        )
    return rows


def shown(name: str, cell: Any) -> str:
    """Shares in percent, other fractions with two digits."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1%}" if name in SHARES else f"{cell:.2f}"


def main() -> int:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, action="append", metavar="CSV", help="Azure trace [both samples]")
    parser.add_argument(
        "--limit", type=int, default=1000, metavar="N", help="only the first N requests of each trace [1000]"
    )
    parser.add_argument("--contexts", type=int, default=4, metavar="N", help="size of the pool, in full contexts [4]")
    parser.add_argument(
        "--speed", type=float, default=8.0, metavar="X", help="how many times as fast requests arrive [8]"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    args = parser.parse_args()
    results: dict[str, list[Cells]] = {}
    filled = []
    for path in args.lengths or LENGTHS:
        records = read_trace(path, limit=args.limit)
        rows = results[f"{path.name}: reserved"] = reserved_against_paged(records, args.contexts, args.speed)
        filled.append(rows[-1]["utilised"])
        results[f"{path.name}: batch"] = by_batch(records, args.speed)
    results["prompts with prefixes in common: blocks"] = by_block_size()
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for title, rows in results.items():
            cells = [tuple(shown(*cell) for cell in row.items()) for row in rows]
            print(f"{title}\n\n{table(cells, tuple(rows[0]), right=True)}\n")
    return int(min(filled) < BAR)


if __name__ == "__main__":
    sys.exit(main())
