"""What watching costs the step loop: metrics, traces, events, recordings, the page; each alone, and all together.

    python tests/bench/bench_observers.py [--only metrics] [--rounds 7]

One process, the real engine loop over an executor that answers at once, 256 running decodes. Rounds are interleaved: in
each, every part runs once in an order that turns, and its cost is what a step takes more than the one without any part
in the same round. Two clocks: seconds of the loop's own thread, which other processes do not disturb, and elapsed ones,
which include waiting for threads of the part itself. A run's figure is the lower quartile of its turns of 16 steps, a
cost the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import astuple, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from manager_workloads import outcome
from prometheus_client import CollectorRegistry, generate_latest

from pagekv.kvmanager import engine_loop
from pagekv.kvmanager.engine_config import EngineConfig
from pagekv.kvmanager.engine_loop import EngineLoop
from pagekv.kvmanager.executor_client import Description
from pagekv.kvmanager.metrics import EngineCollector
from pagekv.kvmanager.observer import Observer, RequestEnd
from pagekv.kvmanager.request import GenerateCommand, SamplingParams
from pagekv.kvmanager.request_metrics import RequestMetrics
from pagekv.kvmanager.request_spans import RequestSpans
from pagekv.kvmanager.running import SchedulerLimits
from pagekv.kvmanager.sequence import LiveRequest
from pagekv.kvmanager.step_plan import StepOutcome, StepPlan
from pagekv.kvmanager.tracing import Tracing, otlp_processor

RUNNING = 256
BLOCK_SIZE = 16
# Steps that are measured, in whole turns: in each turn every sequence fills one block.
STEPS = 20 * BLOCK_SIZE
WARM_UP = 4 * BLOCK_SIZE
# One length for each slot of a block, so that each step has its share of sequences that fill one.
PROMPTS = [[100 + token % 977 for token in range(64 + extra)] for extra in range(BLOCK_SIZE)]
# Of the table: what a step of the executor takes, in milliseconds.
STEP_MS = (5, 10, 20)


@dataclass
class Rig:
    """One engine, before it is attached; a part adds its observers and starts what it needs."""

    engine: EngineLoop
    observers: list[Observer]


@dataclass(frozen=True)
class Sample:
    """One run. A step in seconds, of the loop's thread and elapsed; requests that began in one; a scrape in seconds."""

    own_s: float
    elapsed_s: float
    requests_per_step: float
    scrape_s: float


Part = Callable[[Rig], AbstractAsyncContextManager[None]]
PARTS: dict[str, Part] = {}


def part(name: str) -> Callable[[Callable[[Rig], AsyncIterator[None]]], None]:
    """Registers an async generator that sets a part up, yields while it is measured, and ends it."""

    def register(body: Callable[[Rig], AsyncIterator[None]]) -> None:
        PARTS[name] = asynccontextmanager(body)

    return register


@part("metrics")
async def metrics(rig: Rig) -> AsyncIterator[None]:
    rig.observers.append(RequestMetrics())
    yield


@part("spans")
async def spans(rig: Rig) -> AsyncIterator[None]:
    """To a collector of this process that takes everything, in a thread."""
    with collector() as port:
        tracing = Tracing(otlp_processor(f"http://127.0.0.1:{port}/v1/traces"))
        rig.observers.append(RequestSpans(tracing.emit))
        yield
        await tracing.close()


class _TakeAll(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[int]:
    """The port of an HTTP server that answers every POST with 200."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _TakeAll)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- the rig


class _Link:
    """Stands in for ExecutorLink: every step is answered by the time the loop looks."""

    epoch = 1

    def __init__(self, wake: Callable[[], None], on_step: Callable[[], None]) -> None:
        self._wake, self._on_step = wake, on_step
        self._outcomes: deque[StepOutcome] = deque()
        self._step = 0

    async def describe(self, block_size: int, token_budget: int) -> Description:
        return Description("bench", "f00d", 32_000, 8192, 4096, 2**40, "any", "bench", (), 4096)

    async def attach(self, *_: Any) -> None:
        pass

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        self._on_step()
        self._step += 1
        self._outcomes.append(outcome(plan, self._step, 100 + self._step % 50))
        # Whoever else has something to do on this event loop does it in every step.
        await asyncio.sleep(0)

    def take_outcome(self) -> StepOutcome | None:
        return self._outcomes.popleft() if self._outcomes else None

    async def close(self) -> None:
        self._outcomes.clear()


@dataclass
class _Turns:
    """Reads both clocks once a turn."""

    turnover: bool
    engine: EngineLoop | None = None
    steps: int = 0
    running: int = 0
    submitted: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    marks: list[tuple[float, float]] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def on_step(self) -> None:
        self.steps += 1
        while self.turnover and self.running < RUNNING:
            self.submit(_short(self.chance))
        if self.steps >= WARM_UP and self.steps % BLOCK_SIZE == 0:
            self.marks.append((time.thread_time(), time.perf_counter()))
            if self.steps >= WARM_UP + STEPS:
                self.turnover = False
                self.done.set()

    def submit(self, max_tokens: int) -> None:
        assert self.engine is not None
        self.submitted += 1
        # Of a token of its own and then many that others have too: nothing is cached, and it is soon made.
        prompt = [10 + self.submitted % 30_000, *PROMPTS[self.submitted % BLOCK_SIZE]]
        self.engine.submit(GenerateCommand(f"r{self.submitted}", prompt, SamplingParams(max_tokens=max_tokens)))
        self.running += 1

    def step_times(self) -> tuple[float, float]:
        """Seconds a step on each clock: lower quartiles over the turns, which leave out what others do to a turn."""
        turns = [((b[0] - a[0]) / BLOCK_SIZE, (b[1] - a[1]) / BLOCK_SIZE) for a, b in pairwise(self.marks)]
        own_s, elapsed_s = (statistics.quantiles(times, n=4)[0] for times in zip(*turns, strict=True))
        return own_s, elapsed_s


class _Ends(Observer):
    """Part of every measurement, that without any part included."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        self._turns.running -= 1


def config(num_blocks: int) -> EngineConfig:
    """The manager's defaults but for what the work needs."""
    return EngineConfig(
        executor="nowhere",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=0,
        max_model_len=0,
        max_queue=100_000,
        priority_aging=256,
        pipeline_depth=2,
        step_timeout_s=60,
        step_attempts=3,
        take_over=False,
        eviction_policy="slru",
        protected_share=0.2,
        max_pinned_share=0.5,
        limits=SchedulerLimits(max_batch_tokens=1 << 16, max_running=RUNNING, watermark=0.01, prefix_cache=True),
    )


async def measure(parts: list[str], *, turnover: bool, num_blocks: int = 20_000) -> Sample:
    """Runs one engine with these parts."""
    turns = _Turns(turnover)
    observers: list[Observer] = [_Ends(turns)]
    vars(engine_loop)["ExecutorLink"] = lambda target, wake: _Link(wake, turns.on_step)
    engine = turns.engine = EngineLoop(config(num_blocks), observers=observers)
    async with AsyncExitStack() as stack:
        for name in parts:
            await stack.enter_async_context(PARTS[name](Rig(engine, observers)))
        loop = asyncio.create_task(engine.run())
        await engine.wait_ready()
        for _ in range(RUNNING):
            turns.submit(_short(turns.chance) if turnover else 8000)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            done = asyncio.create_task(turns.done.wait())
            await asyncio.wait([done, loop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gc.enable()
            gc.unfreeze()
        if loop.done():
            raise AssertionError("the loop ended") from loop.exception()
        scrape_s = statistics.median(_scrape(engine) for _ in range(9))
        await engine.stop(0)
        await loop
    return Sample(*turns.step_times(), turns.submitted / turns.steps, scrape_s)


def _short(chance: random.Random) -> int:
    """Tokens of a request that is soon over."""
    return 8 + chance.randrange(48)


def _scrape(engine: EngineLoop) -> float:
    begun = time.thread_time()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, RequestMetrics(), prefix_cache=True))
    generate_latest(registry)
    return time.thread_time() - begun


# -- the table


def compare(names: list[list[str]], rounds: int, *, turnover: bool) -> tuple[Sample, list[tuple[float, float]]]:
    """Median of the engine alone, and for each list of parts the seconds it adds to a step on each clock."""
    alone: list[Sample] = []
    added: list[list[tuple[float, float]]] = [[] for _ in names]
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds} ...", file=sys.stderr, flush=True)
        order = [*range(-1, len(names))]
        order = order[turn % len(order) :] + order[: turn % len(order)]
        samples = {i: asyncio.run(measure([] if i < 0 else names[i], turnover=turnover)) for i in order}
        alone.append(samples[-1])
        for i, costs in enumerate(added):
            costs.append((samples[i].own_s - samples[-1].own_s, samples[i].elapsed_s - samples[-1].elapsed_s))
    medians = [(statistics.median(c[0] for c in costs), statistics.median(c[1] for c in costs)) for costs in added]
    typical = Sample(*(statistics.median(values) for values in zip(*map(astuple, alone), strict=True)))
    return typical, medians


def show(names: list[list[str]], rounds: int) -> str:
    """Both tables."""
    alone, costs = compare(names, rounds, turnover=False)
    lines = [
        f"{RUNNING} running decodes; a step of the manager alone: {alone.own_s * 1e6:.0f} us of its thread, "
        f"{alone.elapsed_s * 1e6:.0f} us elapsed",
        "",
        f"{'part':14} {'thread':>9} {'elapsed':>9} {'of own step':>12}"
        + "".join(f"{f'of {ms} ms':>11}" for ms in STEP_MS),
    ]
    for parts, (own, elapsed) in zip(names, costs, strict=True):
        shares = "".join(f"{own / ms * 1e5:10.2f}%" for ms in STEP_MS)
        lines.append(
            f"{_title(parts):14} {own * 1e6:6.1f} us {elapsed * 1e6:6.1f} us {own / alone.own_s * 100:11.1f}%{shares}"
        )
    turning, costs = compare(names, rounds, turnover=True)
    lines += [
        "",
        f"the same with {turning.requests_per_step:.1f} requests that begin and end in every step "
        f"({turning.own_s * 1e6:.0f} us of the thread alone), what one of them adds:",
        "",
        f"{'part':14} {'thread':>9} {'elapsed':>9}",
    ]
    per = turning.requests_per_step
    for parts, (own, elapsed) in zip(names, costs, strict=True):
        lines.append(f"{_title(parts):14} {own / per * 1e6:6.1f} us {elapsed / per * 1e6:6.1f} us")
    scrape_s = asyncio.run(measure([], turnover=False, num_blocks=1_000_000)).scrape_s
    lines += ["", f"a scrape: {alone.scrape_s * 1e3:.1f} ms; of a pool of 1 M blocks: {scrape_s * 1e3:.1f} ms"]
    return "\n".join(lines)


def _title(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "all of them"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only parts whose name contains this, and not all together")
    parser.add_argument("--rounds", type=int, default=7, help="at least 3 (default: 7)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.rounds < 3:
        parser.error(f"--rounds: must be at least 3, got {args.rounds}")
    names = [[name] for name in PARTS if args.only in name]
    if not names:
        parser.error(f"--only: one of {', '.join(PARTS)}, got {args.only!r}")
    print(show([*names, *([] if args.only or len(names) < 2 else [list(PARTS)])], args.rounds))


if __name__ == "__main__":
    main()
