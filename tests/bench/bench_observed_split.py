"""Whether watching slows a step: the split benchmark with everything on that `bench_observers.py` measures, and off.

    python tests/bench/bench_observed_split.py [--step-time-ms 20,10,5] [--rounds 8]

Two stacks, each both processes, take turns of two seconds under 256 client streams. One has everything switched on and
read: metrics scraped once a turn, spans taken by a collector, KV events and a gateway's events by a subscriber each,
the page by a viewer, both recordings written; all of that on this machine. Idle is the executor's time between the end
of a step and the beginning of the next, which is what a slow manager costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_observer_parts import GATEWAY, GATEWAY_METHOD, SUBSCRIBER, collector
from bench_split import BARS_AT, Row, row, stack
from stream_load import Order
from streams import speaking
from support.clients.everything_on import flags
from support.clients.stack import Stack

SECONDS = 2.0
DEPTH = 2
# Reads the page's stream.
VIEWER = "import sys, urllib.request as u\nfor line in u.urlopen(sys.argv[1]): pass"


@contextmanager
def observed(step_ms: float) -> Iterator[tuple[Stack, Callable[[], None]]]:
    """A stack with everything on, and what scrapes its metrics."""
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        spans = opened.enter_context(collector())
        running = opened.enter_context(stack(step_ms, DEPTH, *flags(Path(directory), f"http://127.0.0.1:{spans}")))
        url = f"http://127.0.0.1:{int(Path(directory, 'port').read_text())}"
        for code, *args in (
            (SUBSCRIBER, f"ipc://{directory}/events"),
            (GATEWAY, running.target, GATEWAY_METHOD),
            (VIEWER, f"{url}/api/stream"),
        ):
            opened.enter_context(speaking([sys.executable, "-c", code, *args]))

        def scrape() -> None:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                answer.read()

        yield running, scrape


def compare(step_ms: float, rounds: int) -> dict[str, list[Row]]:
    """Rows of both stacks."""
    rows: dict[str, list[Row]] = {"off": [], "on": []}
    with stack(step_ms, DEPTH) as plain, observed(step_ms) as (watched, scrape):
        for turn in range(2 * rounds):
            name, running = ("off", plain) if (turn + turn // 2) % 2 == 0 else ("on", watched)
            # In the middle of the window, which opens when all streams are going.
            scraping = threading.Timer(SECONDS + 0.2, scrape)
            if name == "on":
                scraping.start()
            rows[name].append(row(running, step_ms, DEPTH, Order(running.target, BARS_AT, seed=turn), SECONDS))
            scraping.cancel()
            print(f"  turn {turn + 1} of {2 * rounds} at {step_ms:g} ms: {name}", file=sys.stderr, flush=True)
    return rows


HEAD = " step        took    idle   tok/s  tok/msg  manager  per step  stolen"


def line(name: str, rows: list[Row]) -> str:
    """Medians."""

    def middle(value: Callable[[Row], float]) -> float:
        return statistics.median(map(value, rows))

    return (
        f"{rows[0].step_ms:5g} {name:>4} {middle(lambda row: row.step_took_ms):6.2f} "
        f"{middle(lambda row: row.idle_percent):6.2f}% {middle(lambda row: row.tokens_per_s):7.0f} "
        f"{middle(lambda row: row.tokens_per_message):8.2f} {middle(lambda row: row.manager_cpu):8.2f} "
        f"{middle(lambda row: 1000 * row.manager_cpu / row.steps_per_s):6.2f} ms "
        f"{middle(lambda row: row.stolen_percent):6.1f}%"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--step-time-ms",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[20.0, 10.0, 5.0],
        help="milliseconds of a step (default: 20,10,5)",
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each stack, at least 1 (default: 8)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: must be at least 1, got {args.rounds}")
    lines = [line(name, rows) for ms in args.step_time_ms for name, rows in compare(ms, args.rounds).items()]
    print("\n".join([HEAD, *lines]))
    print(
        "\nstep, took: milliseconds as told, and as on the executor. idle: of the executor. manager: cores, and the\n"
        "same by step. stolen: of all cores, by the hypervisor for others. Medians of turns under "
        f"{BARS_AT} streams."
    )


if __name__ == "__main__":
    main()
