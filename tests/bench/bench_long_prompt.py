"""Prompts of a million tokens: the longest that the manager's event loop does nothing else for one of them.

The whole manager runs in this process, over an oracle in another one; a third sends the prompts over gRPC. Each turn of
the event loop is taken in CPU time, so other work on the machine hardly counts: while a turn lasts, every stream waits.
Prompts come into an empty pool, cached as a whole, and into a pool full of others' blocks, all of which they evict.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from asyncio import events
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.calls import Caller, request_for
from support.clients.stack import ORACLE, environment, port_of, running_executor

from pagekv.client.cli.terminal import table
from pagekv.common.logs import setup_logs
from pagekv.common.port_file import read_port_file
from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.server import Manager

LENGTH = 1_000_000
BLOCKS = LENGTH // 16
# Turns that take longer than this, in seconds, are counted.
LONG_S = 0.005


class Turns:
    """CPU seconds of the callbacks that the event loop runs, from `begin` to `end`."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        run = events.Handle._run

        def timed(handle: Any) -> None:
            begun = time.thread_time()
            run(handle)
            self._seconds.append(time.thread_time() - begun)

        events.Handle._run = timed  # type: ignore[method-assign, assignment]  # asyncio has no hook for this

    def begin(self) -> None:
        self._seconds.clear()

    def end(self) -> tuple[float, int]:
        """The longest, and how many were long."""
        return max(self._seconds), sum(taken > LONG_S for taken in self._seconds)


async def send(target: str, seed: int) -> None:
    """In a process of its own: one prompt, read to its end."""
    chance = random.Random(seed)
    prompt = [chance.randrange(8, 500) for _ in range(LENGTH)]
    async with Caller(target) as caller:
        await caller.generate(request_for(prompt, 2, ignore_eos=True))


async def measure(executor: str, port_file: Path, repeats: int) -> dict[str, list[tuple[float, int]]]:
    # Room for two prompts and a little more: the third evicts the first.
    flags = ["--num-device-blocks", str(2 * BLOCKS + 1000), "--max-batch-tokens", "16384", "--watermark", "0"]
    config = parse_config(["--executor", executor, "--listen", "127.0.0.1:0", "--port-file", str(port_file), *flags])
    manager, stop, turns = Manager(config, None), asyncio.Event(), Turns()
    serving = asyncio.create_task(manager.run(stop))
    await manager.engine.wait_ready()
    target = f"127.0.0.1:{port_of(read_port_file(port_file))}"
    found: dict[str, list[tuple[float, int]]] = {}

    async def prompt(seed: int) -> tuple[float, int]:
        turns.begin()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--send", target, str(seed), env=environment()
        )
        assert await sender.wait() == 0
        return turns.end()

    # The first one finds a manager that is still starting.
    await prompt(-1)
    for number in range(repeats):
        manager.engine.queries.reset_prefix_cache(force=True)
        for name, which in (("cold", 0), ("cached", 0), ("cold", 1), ("cold, evicting as many blocks", 2)):
            found.setdefault(name, []).append(await prompt(3 * number + which))
    stats = manager.engine.queries.stats()
    assert stats.cached_tokens_total >= repeats * (LENGTH - 1) // 16 * 16, "not cached"
    assert stats.evicted_blocks_total >= repeats * (BLOCKS - 1000)
    stop.set()
    await serving
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each kind; twice as many cold ones [5]")
    parser.add_argument("--send", nargs=2, metavar=("TARGET", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        asyncio.run(send(args.send[0], int(args.send[1])))
        return
    setup_logs("kvmanager", "warning", "text")
    oracle = [*ORACLE, "--max-model-len", str(LENGTH + 1000), "--kv-memory", "1GiB"]
    with running_executor(oracle) as executor:
        found = asyncio.run(measure(executor.target, executor.directory / "manager.port", args.repeats))
    print(f"{LENGTH} tokens, CPU time of turns of the event loop, medians of {args.repeats}")
    rows = [
        (
            name,
            *(f"{1e3 * pick([longest for longest, _ in turns]):.1f}" for pick in (statistics.median, max)),
            f"{statistics.median(count for _, count in turns):.0f}",
        )
        for name, turns in found.items()
    ]
    print(table(rows, ("prompt", "longest turn ms", "of all", f"turns above {1e3 * LONG_S:g} ms"), indent="  "))


if __name__ == "__main__":
    main()
