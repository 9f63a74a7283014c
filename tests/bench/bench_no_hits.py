"""The cost of the prefix cache where nothing is ever hit: the manager's CPU time with it and without, in turns.

Recorded lengths on the real scheduler, no two prompts alike, arrivals so fast that steps are full. The time that
hashing, publishing and evicting take is set against the simulated time of the same steps (`pagekv replay --help` has
their costs). That counts too much: with two steps in flight the manager works while the executor does. The bar is of
the literature, 0.3 % measured by SGLang (Zheng et al., 2024, section 6.3), under 1 % by vLLM. Exit status 1: missed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pagekv.kvmanager.replay.options import NO_CACHE, ReplayOptions
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord, read_trace

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"
SAMPLES = (TRACES / "azure_sample.csv", TRACES / "azure_code_sample.csv")
BAR = 0.01
# Half a million tokens: the samples are evicted, too, when they come again and again.
BLOCKS = 32_768
OPTIONS = ReplayOptions(block_size=16, tokens_per_id=512, partial_blocks=False, speed=16.0)


def replay(records: Sequence[TraceRecord], policy: str) -> tuple[float, float]:
    """CPU seconds of this process, and simulated seconds."""
    gc.collect()
    begun = time.process_time()
    row = replay_timed(records, OPTIONS, policy, BLOCKS, lambda done: None)
    taken = time.process_time() - begun
    assert row.timing is not None
    assert row.hit_tokens == 0
    return taken, row.timing.simulated_s


def main() -> int:
    """Prints a row for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", metavar="CSV", help="Azure trace [both samples]")
    parser.add_argument(
        "--limit", type=int, default=2000, metavar="N", help="only the first N requests of each trace [2000]"
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="measurements of each trace [15]")
    args = parser.parse_args()
    worst = 0.0
    for path in args.trace or SAMPLES:
        records = read_trace(path, limit=args.limit)
        seconds: dict[str, list[float]] = {"slru": [], NO_CACHE: []}
        simulated = 0.0
        for number in range(args.rounds):
            for policy in sorted(seconds, reverse=bool(number % 2)):
                taken, simulated = replay(records, policy)
                seconds[policy].append(taken)
        on, off = (statistics.median(taken) for taken in seconds.values())
        cost = (on - off) / simulated
        worst = max(worst, cost)
        print(
            f"{path.name}: {len(records):,} requests, {simulated:.1f} s of steps; CPU of the manager with the cache "
            f"{on:.3f} s, without {off:.3f} s: {cost:.2%} of the steps (bar {BAR:.0%})"
        )
    return int(worst >= BAR)


if __name__ == "__main__":
    sys.exit(main())
