"""Prompts of a million tokens: the longest that the manager's event loop does nothing else for one of them.

The whole manager runs in this process, over an oracle in another one; a third sends the prompts over gRPC. Each turn of
the event loop is taken in CPU time, so other work on the machine hardly counts: while a turn lasts, every stream waits.
Prompts come into an empty pool, cached as a whole, and into a pool full of others' blocks, all of which they evict;
they are looked up, explained and pinned, and resumed by half of themselves. A sequence of as many tokens is swapped
out and comes back, and evicted blocks are written back. The executor's part is what it does with the
step in which such a sequence enters, in this process.
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
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.calls import Caller, request_for
from support.clients.stack import ORACLE, environment, port_of, running_executor
from support.prompts import as_prompt

from pagekv.client.cli.terminal import table
from pagekv.common.logs import setup_logs
from pagekv.common.port_file import read_port_file
from pagekv.executor.rpc import wire
from pagekv.executor.session.step import Step
from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.server import Manager
from pagekv.steps.v1 import executor_service_pb2 as steps_pb
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import cache_service_pb2_grpc as pb_grpc

LENGTH = 1_000_000
BLOCKS = LENGTH // 16
# Turns that take longer than this, in seconds, are counted.
LONG_S = 0.005
# Name, prompt and what is asked: so many tokens, or a question.
CALLS = (
    ("cold", 0, "2"),
    ("cached", 0, "2"),
    ("LookupPrefix, cached", 0, "lookup"),
    ("ExplainPrefix, cached, a page of 1,000", 0, "explain"),
    ("PinPrefix, cached", 0, "pin"),
    ("LookupPrefix, cold", 1, "lookup"),
    ("half of it resumed, cached", 0, "resume"),
    ("cold", 1, "2"),
    ("cold, evicting as many blocks", 2, "2"),
)
WRITTEN_BACK = (
    ("cold, with write-back", 0, "2"),
    ("cached, with write-back", 0, "2"),
    ("cold, with write-back", 1, "2"),
    ("cold, evicting as many blocks with write-back", 2, "2"),
)


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


def prompt_of(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(8, 500) for _ in range(LENGTH)]


async def send(target: str, seed: int, call: str) -> None:
    """In a process of its own: one call about one prompt, read to its end."""
    prompt = prompt_of(seed)
    async with Caller(target) as caller:
        cache = cast("pb_grpc.CacheServiceAsyncStub", pb_grpc.CacheServiceStub(caller.channel))
        if call == "lookup":
            await cache.LookupPrefix(pb.LookupPrefixRequest(prompt=as_prompt(prompt)))
        elif call == "explain":
            await cache.ExplainPrefix(pb.ExplainPrefixRequest(prompt=as_prompt(prompt)))
        elif call == "pin":
            pin = await cache.PinPrefix(pb.PinPrefixRequest(prompt=as_prompt(prompt), lease_seconds=60))
            assert pin.pinned_tokens > LENGTH - 16
            await cache.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin.pin_id))
        elif call == "resume":
            request = request_for(prompt[: LENGTH // 2], LENGTH, ignore_eos=True)
            request.sampling_params.max_tokens = LENGTH // 2 + 2
            request.resumed_token_ids.extend(prompt[LENGTH // 2 :])
            await caller.generate(request)
        else:
            await caller.generate(request_for(prompt, int(call), ignore_eos=True))


async def measure(executor: str, port_file: Path, repeats: int, write_back: bool) -> dict[str, list[tuple[float, int]]]:
    # Room for two prompts and a little more: the third evicts the first.
    flags = ["--num-device-blocks", str(2 * BLOCKS + 1000), "--max-batch-tokens", "16384", "--watermark", "0"]
    flags += ["--max-pinned-share", "1", "--num-host-blocks", str(BLOCKS + 1000), "--preemption", "swap"]
    if write_back:
        flags.append("--write-back")
    config = parse_config(["--executor", executor, "--listen", "127.0.0.1:0", "--port-file", str(port_file), *flags])
    manager, stop, turns = Manager(config, None), asyncio.Event(), Turns()
    serving = asyncio.create_task(manager.run(stop))
    await manager.engine.wait_ready()
    target = f"127.0.0.1:{port_of(read_port_file(port_file))}"
    found: dict[str, list[tuple[float, int]]] = {}

    async def sent(seed: int, call: str) -> tuple[float, int]:
        turns.begin()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--send", target, str(seed), call, env=environment()
        )
        assert await sender.wait() == 0
        return turns.end()

    async def swapped(seed: int) -> tuple[float, int]:
        """A sequence is swapped out while it decodes, and goes on."""
        sending = asyncio.create_task(sent(seed, "3000"))
        running = manager.engine._state.serving().running
        while not any(sequence.num_output for sequence in running):  # noqa: ASYNC110  # nothing tells of a first token
            await asyncio.sleep(0.01)
        turns.begin()
        before = manager.engine.statistics.stats().swapped_out_blocks_total
        asyncio.get_running_loop().call_soon(manager.engine._state.serving().preempt_all)
        took = await sending
        assert manager.engine.statistics.stats().swapped_out_blocks_total - before >= BLOCKS
        return took

    queries = manager.engine.queries
    # The first ones find a manager that is still starting, and a pool whose memory was never touched.
    for seed in (-1, -2, -3):
        await sent(seed, "2")
    for number in range(repeats):
        queries.reset_prefix_cache(force=True)
        for name, which, call in WRITTEN_BACK if write_back else CALLS:
            found.setdefault(name, []).append(await sent(3 * number + which, call))
        if not write_back:
            found.setdefault("a sequence swapped out, and back", []).append(await swapped(3 * number + 2))
    stats = manager.engine.statistics.stats()
    assert stats.cached_tokens_total >= repeats * (LENGTH - 1) // 16 * 16, "not cached"
    assert stats.evicted_blocks_total >= repeats * (BLOCKS - 1000)
    stop.set()
    await serving
    return found


async def measure_executor(repeats: int) -> list[tuple[float, int]]:
    """Of the executor's part of the step in which a sequence enters: the message read, and made the executor's own."""
    new = steps_pb.NewSequence(token_ids=prompt_of(0), block_ids=range(BLOCKS), num_prompt_tokens=LENGTH)
    data = steps_pb.StepRequest(epoch=1, step=1, new_seqs=[new]).SerializeToString()
    turns, found = Turns(), []
    for _ in range(repeats):
        await asyncio.sleep(0)
        turns.begin()

        async def taken() -> Step:
            return await wire.large_step(await wire.read_step(data, None, lambda epoch: None), data)

        await asyncio.create_task(taken())
        await asyncio.sleep(0)
        found.append(turns.end())
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each kind, and twice as many cold ones [5]")
    parser.add_argument("--send", nargs=3, metavar=("TARGET", "SEED", "CALL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        asyncio.run(send(args.send[0], int(args.send[1]), args.send[2]))
        return
    setup_logs("kvmanager", "warning", "text")
    oracle = [*ORACLE, "--max-model-len", str(LENGTH + 4000), "--kv-memory", "1GiB"]
    found: dict[str, list[tuple[float, int]]] = {}
    for write_back in (False, True):
        with running_executor(oracle) as executor:
            port_file = executor.directory / "manager.port"
            found |= asyncio.run(measure(executor.target, port_file, args.repeats, write_back))
    found["the executor, a step with such a sequence"] = asyncio.run(measure_executor(args.repeats))
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
