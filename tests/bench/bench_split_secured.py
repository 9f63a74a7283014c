"""The cost of mutual TLS at every port, keys and two tenants: CPU of the manager for a step of 256 decodes, and for a
message, against the same stack without any of it, in turns.

    PYTHONPATH=tests:tests/bench python tests/bench/bench_split_secured.py [--rounds 5]

Both stacks run all the time, one is loaded at a time. The executor is the oracle with steps of 20 ms, so every stream
has its token in every step, and a step costs what 256 messages cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_split import Row, row, stack
from stream_load import Order
from support.clients.protected_stack import KEYS, protected_stack

SEQUENCES, STEP_MS, SECONDS = 256, 20.0, 6.0
# Of the secured stack's CPU to the other's.
BAR = 1.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    executor = ["--backend=oracle", "--model=demo", f"--step-time-ms={STEP_MS:g}", "--kv-memory=128MiB"]
    executor += ["--max-model-len=65536", "--max-sequences=1100"]
    manager = ["--pipeline-depth=2", "--max-running=1100"]
    plain: list[Row] = []
    secured: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(STEP_MS, 2) as open_stack,
        protected_stack(Path(folder), executor, manager) as protected,
    ):
        pair = protected.client_pair
        files = {"ca": str(protected.authority.ca), "cert": str(pair.cert), "key": str(pair.key)}
        keys = (KEYS["alice"], KEYS["bob"])
        for seed in range(args.rounds):
            open_order = Order(open_stack.target, SEQUENCES, seed)
            plain.append(row(open_stack, STEP_MS, 2, open_order, SECONDS))
            order = Order(protected.stack.target, SEQUENCES, seed, **files, bearers=keys)
            secured.append(row(protected.stack, STEP_MS, 2, order, SECONDS))
            print(f"round {seed + 1}: {_shown(plain[-1])} without, {_shown(secured[-1])} with", flush=True)
    for what, cost in (("a step", _step_us), ("a message", _message_us)):
        pairs = [(cost(with_), cost(without)) for with_, without in zip(secured, plain, strict=True)]
        ratio = statistics.median(with_ / without for with_, without in pairs)
        verdict = "holds" if ratio <= BAR else "MISSED"
        with_, without = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"{verdict}: {what} {without:.1f} -> {with_:.1f} us of the manager's CPU, {ratio:.3f} of {BAR}")


def _step_us(row: Row) -> float:
    return 1e6 * row.manager_cpu / row.steps_per_s


def _message_us(row: Row) -> float:
    return 1e6 * row.manager_cpu / row.messages_per_s


def _shown(row: Row) -> str:
    return f"{_step_us(row):.0f} us a step, {_message_us(row):.1f} us a message ({row.steps_per_s:.1f} steps/s)"


if __name__ == "__main__":
    main()
