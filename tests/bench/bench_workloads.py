"""The worth of the prefix cache for the workloads that it is meant for, and for those that it cannot help.

Two tables, each with the cache and without, on the real scheduler in simulated time (`pagekv replay --help` has the
costs of a step), so that every figure is the same on every machine. Named workloads: hits, the median time to the first
token of requests that come alone, and requests a second of the same requests at once. Shares: prompts of 4,224 tokens
of which a share is cached, in the last row all but the one that is always computed.

An answer's tokens are unlike anything else here, so a next turn hits the prompt of the one before and not its answer,
as a real one would. `--plot` draws both tables. Exit status 1: a workload that shares gains nothing, or one that cannot
gain changes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from pagekv.client.cli.terminal import table
from pagekv.kvmanager.replay.options import NO_CACHE, ReplayOptions
from pagekv.kvmanager.replay.report import Row, StepTiming
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord

# Room for every prefix here; eviction has measurements of its own.
BLOCKS = 2**14
# A hash id stands for one token.
OPTIONS = ReplayOptions(block_size=16, tokens_per_id=1, partial_blocks=False)
# Seconds between arrivals: each alone, or all at once but in order.
ALONE, AT_ONCE = 1000.0, 1e-4

Cells = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, and how many tokens answer it."""

    prompt: tuple[int, ...]
    output: int


class Tokens:
    """Token ids, none of them twice."""

    def __init__(self) -> None:
        self.rng = random.Random(11)
        self._next: Iterator[int] = count()

    def __call__(self, low: int, high: int | None = None) -> tuple[int, ...]:
        """So many new ones, or a number from `low` to `high` of them."""
        return tuple(next(self._next) for _ in range(self.rng.randint(low, high or low)))


def behind(prefixes: int, length: int, own: tuple[int, int], output: tuple[int, int], requests: int) -> list[Request]:
    """Requests that begin with one of so many prefixes."""
    new = Tokens()
    before = [new(length) for _ in range(prefixes)]
    return [Request(new.rng.choice(before) + new(*own), new.rng.randint(*output)) for _ in range(requests)]


def in_turns(sessions: int, turns: int, before: int, added: tuple[int, int], output: int) -> list[Request]:
    """Sessions that go on in turns, one turn of each after the other: every prompt is the one before it, an answer and
    something new, behind tokens that all sessions have in common.
    """
    new = Tokens()
    common = new(before)
    histories = [common] * sessions
    requests = []
    for _ in range(turns):
        for session in range(sessions):
            histories[session] += new(*added)
            requests.append(Request(histories[session], output))
            histories[session] += new(output)
    return requests


def without_the_first(requests: Sequence[Request]) -> list[Request]:
    """The same prompts, each behind a token of its own."""
    return [Request((2**29 + number, *request.prompt), request.output) for number, request in enumerate(requests)]


@dataclass(frozen=True)
class Workload:
    """Requests in words, and how they are made."""

    words: str
    make: Callable[[], list[Request]]


WORKLOADS = {
    "system-prompt": Workload(
        "one prompt of 1,000 tokens, questions of 20 to 200", lambda: behind(1, 1000, (20, 200), (50, 200), 200)
    ),
    "few-shot": Workload(
        "four tasks of 2,000 tokens of examples, answers of 5 to 20", lambda: behind(4, 2000, (50, 50), (5, 20), 200)
    ),
    "documents": Workload(
        "ten documents of 8,000 tokens, ten questions to each", lambda: behind(10, 8000, (50, 50), (100, 100), 100)
    ),
    "one-corpus": Workload("100 questions to 20,000 tokens", lambda: behind(1, 20_000, (50, 50), (50, 50), 100)),
    "turns": Workload("20 conversations of 8 turns", lambda: in_turns(20, 8, 100, (20, 100), 200)),
    "agents": Workload(
        "20 agents behind 3,000 tokens of tools, 10 steps of 300", lambda: in_turns(20, 10, 3000, (300, 300), 50)
    ),
    "nothing-shared": Workload("cold prompts of 1,000 tokens", lambda: behind(1, 0, (1000, 1000), (50, 200), 200)),
    "first-differs": Workload(
        "system-prompt, each behind a token of its own",
        lambda: without_the_first(behind(1, 1000, (20, 200), (50, 200), 200)),
    ),
    "below-a-block": Workload("15 tokens in common", lambda: behind(1, 15, (1000, 1000), (50, 200), 200)),
    "long-answers": Workload(
        "200 tokens in common, answers of 1,000", lambda: behind(1, 200, (20, 50), (1000, 1000), 100)
    ),
}
GAINS = ("system-prompt", "few-shot", "documents", "one-corpus", "turns", "agents")


def replay(requests: Sequence[Request], gap_s: float, policy: str) -> tuple[Row, StepTiming]:
    """The requests in order, one every `gap_s` simulated seconds."""
    records = [TraceRecord(at * gap_s, len(r.prompt), r.output, r.prompt) for at, r in enumerate(requests)]
    row = replay_timed(records, OPTIONS, policy, BLOCKS, lambda done: None)
    assert row.timing is not None
    assert row.timing.refused == 0
    return row, row.timing


def first_token_ms(timing: StepTiming) -> float:
    """The median."""
    assert timing.ttft_s is not None
    return timing.ttft_s.p50 * 1e3


def of_workload(name: str) -> Cells:
    """A row of the first table."""
    requests = WORKLOADS[name].make()
    (_, without), (row, cached) = (replay(requests, ALONE, policy) for policy in (NO_CACHE, "slru"))
    cold, warm = first_token_ms(without), first_token_ms(cached)
    slow, fast = (len(requests) / replay(requests, AT_ONCE, policy)[1].simulated_s for policy in (NO_CACHE, "slru"))
    return {
        "workload": name,
        "tokens hit": row.token_hit_rate,
        "first token, ms": cold,
        "cached, ms": warm,
        "times sooner": cold / warm,
        "requests/s": slow,
        "cached, /s": fast,
        "times as many": fast / slow,
    }


def by_share() -> list[Cells]:
    """The second table; the first request computes the prefix and is not measured. Answers of 128 tokens."""
    rows: list[Cells] = []
    for percent in (0, 25, 50, 75, 97, 100):
        shared = 4224 * percent // 100 // 16 * 16
        requests = behind(1, shared, (max(1, 4224 - shared),) * 2, (128, 128), 101)
        ttft = first_token_ms(replay([replace(request, output=1) for request in requests], ALONE, "slru")[1])
        _, timing = replay(requests, AT_ONCE, "slru")
        rows.append(
            {
                "prompt tokens": max(4224, shared + 1),
                "cached": shared,
                "first token, ms": ttft,
                "prompt tok/s alone": 4224 / ttft * 1e3,
                "requests/s": len(requests) / timing.simulated_s,
                "times the first": 1.0 if not rows else len(requests) / timing.simulated_s / rows[0]["requests/s"],
            }
        )
    return rows


def draw(path: Path, named: Sequence[Cells], shares: Sequence[Cells]) -> None:
    """Writes both tables (the second may be empty) as .png, .pdf or else SVG. Needs matplotlib. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.45 * len(named) + 3.5 * bool(shares)), layout="constrained")
    figure.suptitle("What the prefix cache is worth: simulated time, an 8B model on an accelerator by data sheet")
    above, below = figure, None
    if shares:
        above, below = figure.subfigures(2, squeeze=False, height_ratios=(1 + 0.45 * len(named), 3.5))[:, 0]
    axes = above.subplots()
    for above_or_below, figure_of, key in ((-0.2, "first token", "times sooner"), (0.2, "requests/s", "times as many")):
        gains = [row[key] for row in named]
        places = [place + above_or_below for place in range(len(named))]
        bars = axes.barh(places, [gain - 1 for gain in gains], 0.4, left=1, label=f"{figure_of}: {key}")
        axes.bar_label(bars, [f"{gain:.3g}" for gain in gains], padding=2)
    axes.set_yticks(range(len(named)), [row["workload"] for row in named])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.9, 1.5 * max(row["times sooner"] for row in named))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.legend()
    if below is not None:
        for axes, key in zip(below.subplots(1, 2), ("first token, ms", "requests/s"), strict=True):
            axes.plot([row["cached"] for row in shares], [row[key] for row in shares], marker="o")
            axes.set_title(key, loc="left")
            axes.set_xlabel("cached tokens of a prompt of 4,224")
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
    kind = path.suffix.lower().removeprefix(".")
    figure.savefig(path, format=kind if kind in ("png", "pdf") else "svg")


def shown(name: str, cell: Any) -> str:
    """Shares in percent, large numbers without fractions."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1%}" if name == "tokens hit" else f"{cell:,.0f}" if cell >= 1000 else f"{cell:.2f}"


def main() -> int:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .svg, .png or .pdf (pagekv[plot])")
    args = parser.parse_args()
    if args.plot is not None:
        # Refused now rather than after a minute.
        if find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install 'pagekv[plot]'")
        args.plot.open("a").close()
    named = [of_workload(name) for name in args.workload or WORKLOADS]
    tables = {"workloads": named} if args.workload else {"workloads": named, "shares": by_share()}
    if args.json:
        print(json.dumps(tables, indent=2))
    else:
        for rows in tables.values():
            cells = [tuple(shown(*cell) for cell in row.items()) for row in rows]
            print(f"{table(cells, tuple(rows[0]), right=True)}\n")
        for row in named:
            print(f"{row['workload']}: {WORKLOADS[row['workload']].words}")
    if args.plot is not None:
        draw(args.plot, named, tables.get("shares", []))
    missed = [row["workload"] for row in named if not _as_expected(row)]
    for name in missed:
        print(f"{name}: not as expected", file=sys.stderr)
    return int(bool(missed))


def _as_expected(row: Cells) -> bool:
    if row["workload"] in GAINS:
        return bool(row["times sooner"] > 1.5 and row["times as many"] > 1.1)
    if row["workload"] == "long-answers":
        # The prompt is a small part of it: what the cache saves there hardly shows.
        return bool(row["times as many"] < 1.1)
    return bool(row["tokens hit"] < 0.02 and 0.97 < row["times as many"] < 1.03)


if __name__ == "__main__":
    sys.exit(main())
