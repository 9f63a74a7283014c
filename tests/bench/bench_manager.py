"""The manager's own cost, beside what its peers were measured at: `make bench-manager`; ARGS=--json for machines.

One process, one thread, block size 16, prefix cache on with SHA-256 identities and token comparison. Figures are
medians; the spread is that of the middle half. SHA-256 is measured beside them, on this machine and in this run: it is
the floor of everything that has to identify new blocks, and tells how this machine compares with the one that the peers
were measured on, where it took 0.48 microseconds a block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import manager_workloads as work

# SHA-256 of one block of 16 tokens after its parent, on the machine where the peers and the bounds were measured.
REFERENCE_HASH_S = 124e-6 / 256


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work. `unit` says what value, spread and bound count; smaller is better unless it is a rate."""

    work: str
    unit: str
    value: float
    # Middle half of the samples.
    low: float
    high: float
    samples: int
    # Not to be exceeded (by a rate: not to be fallen short of) on the machine of the peers' figures.
    bound: float | None
    peers: str


@dataclass(frozen=True, slots=True)
class Bench:
    """How one row comes about."""

    work: str
    unit: str
    scale: float
    bound: float | None
    peers: str
    samples: Callable[[int], list[float]]


BENCHES = [
    Bench("SHA-256 of 256 blocks (floor)", "us", 1e6, None, "124 us", lambda n: work.hash_floor(4096, max(n, 9))),
    Bench(
        "schedule + commit, 256 decodes",
        "us",
        1e6,
        120,
        "vLLM 0.33 3140, mini-sglang 240, nano-vllm 218",
        lambda n: work.decode_steps(256, 16 * (n + 2)),
    ),
    Bench("schedule + commit, 1024 decodes", "us", 1e6, 350, "", lambda n: work.decode_steps(1024, 16 * (n + 2))),
    Bench(
        "admit a cold 4096-token prompt",
        "us",
        1e6,
        300,
        "vLLM 1065, nano-vllm (xxhash) 467",
        lambda n: work.admissions(4096, n, cached=False),
    ),
    Bench(
        "admit it fully cached",
        "us",
        1e6,
        250,
        "vLLM 983, nano-vllm 835",
        lambda n: work.admissions(4096, n, cached=True),
    ),
    Bench(
        "admit a cold 131072-token prompt",
        "ms",
        1e3,
        9,
        "vLLM 24.9, nano-vllm 14.9",
        lambda n: work.admissions(131_072, max(9, n // 2), cached=False),
    ),
    Bench(
        "allocate + publish + free, 10 k blocks",
        "M blocks/s",
        1e-6,
        1.0,
        "vLLM 0.479, nano-vllm 0.451",
        lambda n: [1 / seconds for seconds in work.churn(10_000, n)],
    ),
    Bench(
        "the same, 1 M blocks",
        "M blocks/s",
        1e-6,
        None,
        "",
        lambda n: [1 / seconds for seconds in work.churn(1_000_000, n)],
    ),
    Bench(
        "memory per cached block, 1 M blocks",
        "bytes",
        1,
        260,
        "vLLM 278, mini-sglang 217, both without token ids",
        lambda n: [work.bytes_per_block(1_000_000)],
    ),
    # The floor of both is one look-up, one key or token comparison and one move for each of 8,193 blocks, 0.5 to 1
    # microsecond: 4 to 8 ms. The message of the way back has all of the tokens in it, which is as much again.
    Bench(
        "swap a 131072-token sequence out",
        "ms",
        1e3,
        30,
        "",
        lambda n: work.swaps(131_072, max(9, n // 2), back=False),
    ),
    Bench(
        "bring it back",
        "ms",
        1e3,
        30,
        "",
        lambda n: work.swaps(131_072, max(9, n // 2), back=True),
    ),
]


def measure(bench: Bench, repeats: int) -> Row:
    """Runs one bench."""
    values = sorted(sample * bench.scale for sample in bench.samples(repeats))
    quarter = len(values) // 4
    return Row(
        work=bench.work,
        unit=bench.unit,
        value=statistics.median(values),
        low=values[quarter],
        high=values[-1 - quarter],
        samples=len(values),
        bound=bench.bound,
        peers=bench.peers,
    )


def show(rows: list[Row]) -> str:
    """The table, and what the machine has to do with it."""
    lines = [f"{'work':40} {'median':>9} {'middle half':>19} {'bound':>7}  {'unit':11} peers"]
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound:g}"
        spread = f"{row.low:.4g} to {row.high:.4g}" if row.samples > 1 else ""
        lines.append(f"{row.work:40} {row.value:9.4g} {spread:>19} {bound:>7}  {row.unit:11} {row.peers}")
    by_work = {row.work: row.value for row in rows}
    floor = by_work.get(BENCHES[0].work)
    if floor is not None:
        lines.append(
            f"\nSHA-256 takes {floor / 256:.2f} us a block here, {floor * 1e-6 / 256 / REFERENCE_HASH_S:.2f} times "
            "what it takes where peers and bounds come from."
        )
    small, large = (by_work.get(bench.work) for bench in BENCHES[6:8])
    if small and large:
        lines.append(f"A pool of 1 M blocks costs {small / large:.2f} times what one of 10 k costs (bound 1.3).")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=21, help="samples per row, at least 9 (default: 21)")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    if args.repeats < 9:
        parser.error(f"--repeats: must be at least 9, got {args.repeats}")
    rows = []
    for bench in BENCHES:
        if args.only in bench.work:
            print(f"measuring: {bench.work} ...", file=sys.stderr, flush=True)
            rows.append(measure(bench, args.repeats))
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else show(rows))


if __name__ == "__main__":
    main()
