"""The cost of clients that behave badly to the others: time between the tokens of well-behaved streams, beside them.

Both processes, the oracle at a fixed step time. Streams of one process are read as they come; in turn they run alone,
and beside another process: calls that nobody reads, calls that are cancelled at once, a flood that the queue refuses.
All of it, the callers too, shares this machine's cores, so what counts is the comparison with `alone` in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import uvloop
from stream_load import Order
from streams import streaming
from support.clients.calls import Caller, request_for
from support.clients.stack import ORACLE, running_stack

from pagekv.client.cli.terminal import table

STREAMS = 64


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
    """More calls at once than the queue takes, 320 a second."""
    while not stop.is_set():
        calls = [caller.generate(request_for([9, n], 3, ignore_eos=True)) for n in range(2 * STREAMS)]
        begin = time.monotonic()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(max(0.0, 0.4 - (time.monotonic() - begin)))


BESIDE: dict[str, Callable[[Caller, asyncio.Event], Coroutine[None, None, None]]] = {
    "alone": nothing,
    "16 calls that nobody reads": silent,
    "100 cancelled calls a second": cancelled,
    "320 calls a second, queue full": flood,
}


async def measure(target: str, seconds: float, name: str) -> list[object]:
    async with Caller(target) as caller:
        stop = asyncio.Event()
        with streaming(Order(target, STREAMS)) as good:
            beside = asyncio.create_task(BESIDE[name](caller, stop))
            await asyncio.sleep(0.5)
            before = await caller.stats()
            good.begin()
            await asyncio.sleep(seconds)
            after = await caller.stats()
            report = await asyncio.to_thread(good.end)
        stop.set()
        await beside
        stats = await caller.idle_stats(60)
    idle = after.executor_idle_us_total - before.executor_idle_us_total
    busy = after.executor_busy_us_total - before.executor_busy_us_total
    steps = after.steps_total - before.steps_total
    gaps = [f"{gap:.1f}" for gap in (report.gap_p50, report.gap_p99, report.gap_max)]
    left = stats.num_device_blocks - stats.free_blocks
    executor = [f"{busy / steps / 1000:.1f}", f"{100 * idle / (idle + busy):.1f} %"]
    return [name, *gaps, f"{report.messages / seconds:.0f}", *executor, stats.rejected_requests_total, left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="seconds for each row [60]")
    parser.add_argument("--step-ms", type=float, default=20, help="milliseconds of a step [20]")
    parser.add_argument("--quick", action="store_true", help="5 seconds for each row")
    args = parser.parse_args()
    seconds = 5.0 if args.quick else args.seconds
    oracle = [*ORACLE, "--step-time-ms", str(args.step_ms), "--max-model-len", "65536", "--kv-memory", "64MiB"]
    # No prefix cache: a prompt costs the same each time. A queue that the flood overruns.
    running, queue = str(STREAMS + 24), str(STREAMS)
    with running_stack(oracle, ["--max-queue", queue, "--max-running", running, "--no-prefix-cache"]) as stack:
        rows = [uvloop.run(measure(stack.target, seconds, name)) for name in BESIDE]
    header = (
        *(f"{STREAMS} streams", "gap p50 ms", "p99", "most", "messages/s"),
        *("step ms", "executor idle", "refused so far", "blocks not back"),
    )
    print(f"steps of {args.step_ms:g} ms, {seconds:g} s for each row")
    print(table(rows, header, indent="  "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
