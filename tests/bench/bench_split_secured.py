"""The cost of mutual TLS at every port, keys and two tenants: CPU of the manager for a step of 256 decodes, and for a
message, against the same stack without any of it, in turns.

    PYTHONPATH=tests:tests/bench python tests/bench/bench_split_secured.py [--rounds 9]

Both stacks run all the time, one is loaded at a time, for as many steps as the other, and the one that begins a round
alternates. The executor is the oracle, with steps so long that every stream has its token in a message of its own in
every step also on a busy machine: else a step is less work. A round in which that was not so is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_split import counters, stack, wait_idle
from stream_load import Order
from streams import streaming
from support.clients.protected_stack import KEYS, protected_stack
from support.clients.stack import Stack

from pagekv.client import PageKVClient

SEQUENCES, STEPS, STEP_MS = 256, 60, 100.0
# Of messages to tokens: fewer are a load of another kind.
WHOLE = 0.97
# Of the secured stack's CPU to the other's.
BAR = 1.10


@dataclass(frozen=True, slots=True)
class Turn:
    """One stack's turn. CPU is the manager's, in microseconds."""

    step_us: float
    message_us: float
    # Messages and tokens of a step.
    messages: float
    tokens: float

    @property
    def whole(self) -> bool:
        """Whether every stream had its token in every step, in a message of its own."""
        return self.messages >= WHOLE * SEQUENCES and self.tokens >= WHOLE * SEQUENCES


def turn(stack: Stack, order: Order) -> Turn:
    """Loads the stack for so many steps."""
    with PageKVClient(stack.target, timeout=120, credentials=stack.callers) as client:
        with streaming(order) as load:
            load.begin()
            before = counters(stack, client)
            time.sleep(STEPS * STEP_MS / 1000)
            # Steps of a slow machine take longer.
            while client.stats().steps_total - before["steps"] < STEPS:
                time.sleep(STEP_MS / 1000)
            after = counters(stack, client)
            report = load.end()
        wait_idle(client)
    steps, cpu_us = after["steps"] - before["steps"], 1e6 * (after["manager"] - before["manager"])
    tokens = (after["tokens"] - before["tokens"]) / steps
    return Turn(cpu_us / steps, cpu_us / max(1, report.messages), report.messages / steps, tokens)


def main() -> int:
    """Command line; 1 when a bar was missed, or nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of two turns each [9]")
    args = parser.parse_args()
    executor = ["--backend=oracle", "--model=demo", f"--step-time-ms={STEP_MS:g}", "--kv-memory=128MiB"]
    executor += ["--max-model-len=65536", "--max-sequences=1100"]
    manager = ["--pipeline-depth=2", "--max-running=1100"]
    pairs: list[tuple[Turn, Turn]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(STEP_MS, 2) as open_stack,
        protected_stack(Path(folder), executor, manager) as protected,
    ):
        pair = protected.client_pair
        files = {"ca": str(protected.authority.ca), "cert": str(pair.cert), "key": str(pair.key)}
        keys = (KEYS["alice"], KEYS["bob"])
        for seed in range(args.rounds):
            without = (open_stack, Order(open_stack.target, SEQUENCES, seed))
            with_ = (protected.stack, Order(protected.stack.target, SEQUENCES, seed, **files, bearers=keys))
            order = (without, with_) if seed % 2 == 0 else (with_, without)
            turns = [turn(*each) for each in order]
            plain, secured = turns if seed % 2 == 0 else turns[::-1]
            whole = plain.whole and secured.whole
            print(
                f"round {seed + 1}: {_shown(plain)} without, {_shown(secured)} with{'' if whole else ': not counted'}"
            )
            sys.stdout.flush()
            pairs += [(plain, secured)] if whole else []
    if not pairs:
        print("not measured: in no round did every stream get a token in every step; the machine is too busy")
        return 1
    step = _verdict("a step", pairs, lambda turn: turn.step_us)
    return max(step, _verdict("a message", pairs, lambda turn: turn.message_us))


def _verdict(what: str, pairs: list[tuple[Turn, Turn]], cost: Callable[[Turn], float]) -> int:
    """Says the median of the rounds' ratios; 1 where the bar is missed."""
    ratios = sorted(cost(secured) / cost(plain) for plain, secured in pairs)
    ratio = statistics.median(ratios)
    without, with_ = (statistics.median(map(cost, turns)) for turns in zip(*pairs, strict=True))
    verdict = "holds" if ratio <= BAR else "MISSED"
    print(
        f"{verdict}: {what} {without:.1f} -> {with_:.1f} us of the manager's CPU, {ratio:.3f} of {BAR}, the median of "
        f"{len(ratios)} rounds from {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )
    return int(ratio > BAR)


def _shown(turn: Turn) -> str:
    return f"{turn.step_us:.0f} us a step of {turn.messages:.1f} messages, {turn.message_us:.1f} us a message"


if __name__ == "__main__":
    sys.exit(main())
