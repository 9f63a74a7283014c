"""A second tier for prefixes: a working set of three times the device pool, with `--write-back` and without.

Both processes with the demo model on the CPU. Prompts are a prefix out of a fixed set and a few tokens of their own,
one request after the other, in random order; every prefix comes once before anything is measured. Without write-back
what the device evicts is computed again; with it, it is copied back from a host pool that holds the whole set. Stacks
run side by side and are asked in turn, because machines are shared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.stack import running_stack

from pagekv.client import PageKVClient
from pagekv.client.cli.terminal import table
from pagekv.client.types import Stats

EXECUTOR = ("--model", "demo", "--dtype", "float32", "--threads", "1", "--kv-memory", "256MiB")
BLOCK_SIZE = 16
# Times the device pool.
WORKING_SET = 3


@dataclass
class Run:
    """One stack: seconds to the first token of each measured request."""

    name: str
    client: PageKVClient
    before: Stats | None = None
    ttft_s: list[float] = field(default_factory=list)

    def ask(self, prompt: list[int]) -> None:
        begin = time.perf_counter()
        with self.client.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True) as stream:
            next(iter(stream))
            self.ttft_s.append(time.perf_counter() - begin)
            for _ in stream:
                pass

    def row(self) -> dict[str, object]:
        before, now = self.before, self.client.stats()
        assert before is not None
        prompts = now.prompt_tokens_total - before.prompt_tokens_total
        ordered = sorted(self.ttft_s)
        return {
            "": self.name,
            "hit rate": (now.cached_tokens_total - before.cached_tokens_total) / prompts,
            "TTFT ms median": 1000 * statistics.median(ordered),
            "TTFT ms p95": 1000 * ordered[int(0.95 * len(ordered))],
            "blocks evicted": now.evicted_blocks_total - before.evicted_blocks_total,
            "written back": now.written_back_blocks_total - before.written_back_blocks_total,
            "copied in": now.swapped_in_blocks_total - before.swapped_in_blocks_total,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller pool and fewer requests: about a minute")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prefix [512]")
    parser.add_argument("--json", type=Path, help="file to write the table to, as JSON")
    args = parser.parse_args()
    held = 4 if args.quick else 8  # prefixes that fit into the device pool
    rounds = 2 if args.quick else 6
    rng = random.Random(0)
    with ExitStack() as stack:
        runs = []
        for name, flags in (("device alone", ["--preemption", "recompute"]), ("with --write-back", ["--write-back"])):
            # Room for the request that runs beside the prefixes.
            blocks = held * args.prefix // BLOCK_SIZE + 4
            pools = ["--num-device-blocks", str(blocks), "--num-host-blocks", str(2 * WORKING_SET * blocks)]
            served = stack.enter_context(running_stack(EXECUTOR, [*pools, *flags, "--block-size", str(BLOCK_SIZE)]))
            runs.append(Run(name, stack.enter_context(PageKVClient(served.target))))
        vocabulary = runs[0].client.model_info().vocab_size
        prefixes = [[rng.randrange(1, vocabulary) for _ in range(args.prefix)] for _ in range(WORKING_SET * held)]
        order = [prefix for _ in range(rounds) for prefix in rng.sample(prefixes, len(prefixes))]
        for number, prefix in enumerate([*prefixes, *order]):
            if number == len(prefixes):
                for run in runs:
                    run.before, run.ttft_s = run.client.stats(), []
            own = [rng.randrange(1, vocabulary) for _ in range(8)]
            for run in runs:
                run.ask([*prefix, *own])
        rows = [run.row() for run in runs]
    print(
        f"{len(prefixes)} prefixes of {args.prefix} tokens, {held} of which the device pool holds; {len(order)} "
        "requests, one after the other"
    )
    shown = [[f"{value:.3g}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print(table(shown, list(rows[0]), indent="  "))
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
