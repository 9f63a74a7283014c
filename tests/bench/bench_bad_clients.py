"""What clients that behave badly cost the others: time between the tokens of well-behaved streams, beside them.

Both processes, the oracle at a fixed step time. Some streams are read as they come; in turn they run alone, beside
calls that nobody reads, beside calls that are cancelled at once, and beside a flood that the queue refuses. All of it,
the callers too, shares this machine's cores, so what counts is the comparison with `alone` in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import uvloop
from calls import Caller, request_for
from stack import ORACLE, running_stack

from pagekv.client.terminal import table

STREAMS = 16
RNG = random.Random(0)


async def read(caller: Caller, seconds: float) -> tuple[list[float], int]:
    """Seconds between messages of one stream after another, and tokens."""
    gaps, tokens = [], 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        before = None
        async for message in caller.inference.Generate(request_for([RNG.randrange(1, 99)] * 8, 400, ignore_eos=True)):
            now = time.monotonic()
            if before is not None and message.HasField("chunk"):
                gaps.append(now - before)
            before = now
            tokens += len(message.chunk.token_ids)
            if now > deadline:
                break
    return gaps, tokens


async def nothing(caller: Caller, stop: asyncio.Event) -> None:
    await stop.wait()


async def silent(caller: Caller, stop: asyncio.Event) -> None:
    """Calls with more to say than the connection buffers, not one message of which is read."""
    calls = [caller.inference.Generate(request_for([9, n], 1500, ignore_eos=True, logprobs=20)) for n in range(16)]
    await stop.wait()
    for call in calls:
        call.cancel()


async def cancelled(caller: Caller, stop: asyncio.Event) -> None:
    """Calls that are given up, 100 a second."""
    while not stop.is_set():
        calls = [caller.inference.Generate(request_for([9, n], 500, ignore_eos=True)) for n in range(10)]
        await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()


async def flood(caller: Caller, stop: asyncio.Event) -> None:
    """More calls at once than the queue takes, 300 a second."""
    while not stop.is_set():
        calls = [caller.generate(request_for([9, n], 3, ignore_eos=True)) for n in range(60)]
        begin = time.monotonic()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(max(0.0, 0.2 - (time.monotonic() - begin)))


BESIDE: dict[str, Callable[[Caller, asyncio.Event], Coroutine[None, None, None]]] = {
    "alone": nothing,
    "16 calls that nobody reads": silent,
    "100 cancelled calls a second": cancelled,
    "300 calls a second, queue full": flood,
}


async def measure(target: str, seconds: float, name: str) -> list[object]:
    async with Caller(target) as good, Caller(target) as bad:
        stop = asyncio.Event()
        beside = asyncio.create_task(BESIDE[name](bad, stop))
        await asyncio.sleep(0.5)
        begin = time.monotonic()
        found = await asyncio.gather(*(read(good, seconds) for _ in range(STREAMS)))
        took = time.monotonic() - begin
        stop.set()
        await beside
        stats = await good.idle_stats(60)
    gaps = sorted(1000 * gap for of_one, _ in found for gap in of_one)
    tokens = sum(count for _, count in found)
    left = stats.num_blocks - stats.free_blocks
    shares = [f"{gaps[min(len(gaps) - 1, int(share * len(gaps)))]:.1f}" for share in (0.5, 0.99, 1)]
    return [name, *shares, f"{tokens / took:.0f}", stats.rejected_requests_total, left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each row [60]")
    parser.add_argument("--step-ms", type=float, default=20, help="the oracle's step time [20]")
    parser.add_argument("--quick", action="store_true", help="5 seconds of each")
    args = parser.parse_args()
    seconds = 5.0 if args.quick else args.seconds
    oracle = [*ORACLE, "--step-time-ms", str(args.step_ms)]
    # No prefix cache: a prompt costs the same each time. A queue that the flood overruns.
    with running_stack(oracle, ["--max-queue", "24", "--max-running", "40", "--no-prefix-cache"]) as stack:
        rows = [uvloop.run(measure(stack.target, seconds, name)) for name in BESIDE]
    header = ("16 streams", "between tokens ms: median", "p99", "most", "tokens/s", "refused so far", "blocks not back")
    print(f"steps of {args.step_ms:g} ms, {seconds:g} s each")
    print(table(rows, header, indent="  "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
