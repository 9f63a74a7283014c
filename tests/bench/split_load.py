"""Client streams for `bench_split.py`, in a process of their own: as many Generate calls as asked for, read as cheaply
as gRPC for Python can, with messages left as bytes.

Speaks lines: prints "ready" once every stream has had a message; "begin" on standard input opens the window that is
measured, "end" closes it, ends the streams and makes it print one line of JSON (`Report`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

from grpc import aio

from pagekv.common.server import run_async
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

GENERATE = "/pagekv.v1.InferenceService/Generate"
PROMPT_TOKENS = 16
# More than any window lasts; the streams are ended by their readers.
MAX_TOKENS = 30_000
# Of a connection whose reader stops: HTTP/2 bytes that the server may send ahead.
SLOW_WINDOW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Order:
    """What to load with. `streams` are measured; the others are beside them."""

    target: str
    streams: int
    # Read one message and then no more.
    stalled: int = 0
    # Read as the measured ones, but are not measured.
    others: int = 0
    # Lanes that open a stream, read a few messages, leave and begin again.
    leaving: int = 0
    seed: int = 0


@dataclass(slots=True)
class Report:
    """What the measured streams saw within the window."""

    messages: int
    # Of the stream with the fewest.
    fewest: int
    # Milliseconds between messages of one stream: median, 99th percentile, most.
    gap_p50: float
    gap_p99: float
    gap_max: float
    # CPU seconds of this process.
    cpu_s: float
    # Streams that left within the window.
    left: int


def request(seed: int, number: int) -> bytes:
    """A prompt of its own, so that no two sequences share blocks."""
    chance = random.Random(f"{seed} {number}")
    return pb.GenerateRequest(
        tokenized=types_pb2.TokenizedInput(input_ids=[chance.randrange(10, 500) for _ in range(PROMPT_TOKENS)]),
        sampling_params=types_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    ).SerializeToString()


class Load:
    """All streams of one order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._numbers = iter(range(10**9))
        self._missing = order.streams + order.stalled + order.others
        self._ready = asyncio.Event()
        self._arrivals: list[list[float]] = [[] for _ in range(order.streams)]
        self._left = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Report:
        """From the first call to the report."""
        order = self._order
        lines = _lines()
        fast = aio.insecure_channel(order.target, options=_options())
        slow = aio.insecure_channel(
            order.target,
            options=[*_options(), ("grpc.http2.lookahead_bytes", SLOW_WINDOW_BYTES), ("grpc.http2.bdp_probe", 0)],
        )
        async with fast, slow:
            for arrivals in self._arrivals:
                self._start(self._read(fast, arrivals.append))
            for _ in range(order.others):
                self._start(self._read(fast, lambda now: None))
            for _ in range(order.stalled):
                self._start(self._stall(slow))
            for _ in range(order.leaving):
                self._start(self._leave(fast))
            await self._ready.wait()
            print("ready", flush=True)
            await _expect(lines, "begin")
            begin, cpu, left = time.perf_counter(), time.process_time(), self._left
            await _expect(lines, "end")
            report = self._report(begin, time.perf_counter(), time.process_time() - cpu, self._left - left)
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            return report

    def _start(self, reader: Any) -> None:
        self._tasks.append(asyncio.create_task(reader))

    def _call(self, channel: aio.Channel) -> Any:
        # Any: without serialisers the stubs of gRPC do not know what goes in and out.
        method: Any = channel.unary_stream(GENERATE)
        return method(request(self._order.seed, next(self._numbers)))

    def _seen(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._ready.set()

    async def _read(self, channel: aio.Channel, note: Callable[[float], None]) -> None:
        call, clock = self._call(channel), time.perf_counter
        new = True
        async for _ in cast("AsyncIterable[bytes]", call):
            note(clock())
            if new:
                new = False
                self._seen()
        print("a stream ended early", file=sys.stderr)
        os._exit(1)

    async def _stall(self, channel: aio.Channel) -> None:
        call = self._call(channel)
        await call.read()
        self._seen()
        await asyncio.Event().wait()

    async def _leave(self, channel: aio.Channel) -> None:
        while True:
            call = self._call(channel)
            for _ in range(8):
                await call.read()
            call.cancel()
            self._left += 1

    def _report(self, begin: float, end: float, cpu_s: float, left: int) -> Report:
        within = [[now for now in arrivals if begin <= now <= end] for arrivals in self._arrivals]
        gaps = sorted(
            1000 * (later - sooner) for arrivals in within for sooner, later in itertools.pairwise(arrivals)
        ) or [0.0]
        counts = [len(arrivals) for arrivals in within]
        return Report(
            messages=sum(counts),
            fewest=min(counts, default=0),
            gap_p50=gaps[len(gaps) // 2],
            gap_p99=gaps[len(gaps) * 99 // 100],
            gap_max=gaps[-1],
            cpu_s=cpu_s,
            left=left,
        )


def _options() -> list[tuple[str, Any]]:
    # No two channels of this process may share a connection, and no proxy is a way to the manager.
    return [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


def _lines() -> asyncio.Queue[str]:
    queue: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: queue.put_nowait(sys.stdin.readline().strip()))
    return queue


async def _expect(lines: asyncio.Queue[str], word: str) -> None:
    got = await lines.get()
    if got != word:
        os._exit(2)  # the benchmark is gone


async def _main() -> int:
    print(json.dumps(asdict(await Load(Order(**json.loads(sys.argv[1]))).run())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_async(_main))
