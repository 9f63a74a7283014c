"""The cost of watching to the step loop: metrics, traces, events, recordings, the page; each alone, and all together.

    python tests/bench/bench_observers.py [--only metrics,record] [--turns 40]

One process with an engine for each part and three without any: the real engine loop over an executor that answers at
once, 256 running decodes. The engines take turns of 64 steps, in an order that turns too. Work that a part puts off is
done before its turn is over: two messages of events for 64 steps, no fewer than there are of steps that take 5 ms.

The machine has moods that halve its speed, so in each round a part is compared with what the engines without any took
in that round, and the rounds give the mean of these differences without the lowest and highest quarter; behind it, its
standard error. Two clocks of processor time: of the loop's own thread, and of all threads, which includes those of the
part itself. The row "nothing" is one more engine without any part, and what it is off zero is what all others may be.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import random
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_observer_parts import PARTS
from manager_workloads import result
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest

from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.observe.metrics.prometheus import EngineCollector
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb

RUNNING = 256
BLOCK_SIZE = 16
# Steps in a turn: every sequence fills four blocks. And turns before it counts.
TURN = 4 * BLOCK_SIZE
WARM_UP = 2
# Engines without any part.
BARE = 3
# One length for each slot of a block, so that each step has its share of sequences that fill one.
PROMPTS = [[100 + token % 977 for token in range(64 + extra)] for extra in range(BLOCK_SIZE)]
# Of the table: what a step of the executor takes, in milliseconds.
STEP_MS = (5, 10, 20)
# Behind each turn, for what its parts put off: longer than any of them waits for more.
SETTLE_S = 0.22

# -- the rig


class _Link:
    """Stands in for ExecutorLink: every step is answered by the time the loop looks."""

    epoch = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()
        self._step = 0

    async def describe(self, block_size: int, token_budget: int) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            model_id="bench",
            model_fingerprint="f00d",
            vocab_size=32_000,
            max_model_len=8192,
            bytes_per_block=4096,
            device_kv_bytes=2**40,
            layout="any",
            backend="bench",
            max_sequences=4096,
            num_layers=1,
            num_kv_heads=1,
            head_size=1,
            kv_dtype="none",
            contract_revision=1,
            max_steps_in_flight=2,
            sampler="bench-1",
        )

    async def attach(self, *_: Any) -> pb.AttachResponse:
        return pb.AttachResponse(epoch=1)

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        await self._runner.step()
        self._step += 1
        self._results.append(result(plan, self._step, 100 + self._step % 50))
        # Other tasks of this event loop run in every step.
        await asyncio.sleep(0)

    def take_result(self) -> StepResult | None:
        return self._results.popleft() if self._results else None

    async def close(self) -> None:
        self._results.clear()


class _Ends(Observer):
    """Of every engine, those without any part included."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        self._runner.running -= 1


class Runner:
    """An engine that takes steps when it is its turn, and reads both clocks around each turn."""

    def __init__(self, *, turnover: bool, num_blocks: int, block_ages: bool) -> None:
        """`turnover`: requests are short, and for each that ends another begins. `block_ages`: as the page has them."""
        self.turnover = turnover
        vars(engine_loop)["ExecutorLink"] = lambda target, wake, credentials: _Link(self)
        self.engine = EngineLoop(config(num_blocks, block_ages))
        self.engine.observers.add(_Ends(self))
        self.running = self.submitted = 0
        # Processor seconds of each turn, of the loop's thread and of all.
        self.turns: list[tuple[float, float]] = []
        self._go, self._rest = asyncio.Event(), asyncio.Event()
        self._left = 1
        self._begun: tuple[float, float] | None = None
        self._over = False
        self._loop: asyncio.Task[None] | None = None
        self._chance = random.Random(7)

    async def start(self) -> None:
        """Attaches, and queues the first requests."""
        self._loop = asyncio.create_task(self.engine.run())
        await self.engine.wait_ready()
        while self.running < RUNNING:
            self._submit()

    async def turn(self) -> None:
        """Lets it take its steps."""
        assert self._loop is not None
        self._rest.clear()
        self._go.set()
        rest = asyncio.create_task(self._rest.wait())
        await asyncio.wait([rest, self._loop], return_when=asyncio.FIRST_COMPLETED)
        if self._loop.done():
            raise AssertionError("the loop ended") from self._loop.exception()

    async def step(self) -> None:
        """Before each step; waits for a turn."""
        if self._over:
            return
        self._left -= 1
        if not self._left:
            await asyncio.sleep(SETTLE_S)
            if self._begun is not None:
                self.turns.append((time.thread_time() - self._begun[0], time.process_time() - self._begun[1]))
            self._rest.set()
            await self._go.wait()
            self._go.clear()
            self._left = TURN
            self._begun = time.thread_time(), time.process_time()
        while self.turnover and self.running < RUNNING:
            self._submit()

    async def stop(self) -> None:
        """Aborts what runs."""
        assert self._loop is not None
        self._over, self.turnover = True, False
        await self.engine.stop(0)
        self._go.set()
        await self._loop

    def _submit(self) -> None:
        self.submitted += 1
        self.running += 1
        # Of a token of its own and then many that others have too: nothing is cached, and it is soon made.
        prompt = [10 + self.submitted % 30_000, *PROMPTS[self.submitted % BLOCK_SIZE]]
        sampling = SamplingParams(max_tokens=8 + self._chance.randrange(48) if self.turnover else 8000)
        self.engine.submit(GenerateCommand(f"r{self.submitted}", prompt, sampling))


def config(num_blocks: int, block_ages: bool) -> EngineConfig:
    """The manager's defaults but for what the work needs."""
    return EngineConfig(
        executor="nowhere",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        max_queue=100_000,
        max_unread=1000000,
        step_timeout_s=600,
        block_ages=block_ages,
        limits=SchedulerLimits(max_batch_tokens=1 << 16, max_running=RUNNING, watermark=0.01, prefix_cache=True),
    )


@asynccontextmanager
async def running(parts: list[str], *, turnover: bool, num_blocks: int) -> AsyncIterator[Runner]:
    """An engine with these parts that waits for its first turn."""
    runner = Runner(turnover=turnover, num_blocks=num_blocks, block_ages="page" in parts)
    async with AsyncExitStack() as stack:
        for name in parts:
            await stack.enter_async_context(PARTS[name](runner.engine))
        await runner.start()
        yield runner
        await runner.stop()


# -- the table


@dataclass(frozen=True)
class Cost:
    """Processor seconds a step, of the loop's thread and of all; and the standard error of the first."""

    own_s: float
    all_s: float
    error_s: float

    def above(self, other: Cost, share: float) -> Cost:
        """The excess over another, divided by `share`."""
        error = math.hypot(self.error_s, other.error_s)
        return Cost((self.own_s - other.own_s) / share, (self.all_s - other.all_s) / share, error / share)


@dataclass(frozen=True)
class Comparison:
    """A step without any part, what each list of parts adds to it, and how many requests begin in one."""

    alone: Cost
    added: list[Cost]
    requests: float


async def compare(names: list[list[str]], turns: int, *, turnover: bool) -> Comparison:
    """The time that engines with these parts take over engines without, round by round."""
    num_blocks = RUNNING * (TURN // BLOCK_SIZE * (turns + 4 * WARM_UP) + 8)
    async with AsyncExitStack() as stack:
        runners = [
            await stack.enter_async_context(running(parts, turnover=turnover, num_blocks=num_blocks))
            for parts in [*[[]] * BARE, *names]
        ]
        # Engines without any part are spread over the round.
        order = runners[BARE:]
        for number, bare in enumerate(runners[:BARE]):
            order.insert(number * len(runners) // BARE, bare)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for turn in range(WARM_UP + turns):
                if turn == WARM_UP:
                    submitted = runners[0].submitted
                at = turn % len(order)
                for runner in [*order[at:], *order[:at]]:
                    await runner.turn()
        finally:
            gc.enable()
            gc.unfreeze()
        requests = (runners[0].submitted - submitted) / (turns * TURN)
    # [runners, turns, 2 clocks].
    seconds = np.array([runner.turns[WARM_UP:] for runner in runners]) / TURN
    alone = seconds[:BARE].mean(axis=0)
    return Comparison(_typical(alone), [_typical(one - alone) for one in seconds[BARE:]], requests)


def _typical(seconds: NDArray[np.float64]) -> Cost:
    """Of both clocks, [turns, 2]: the mean of the half in the middle, and its error by the winsorized deviation (Tukey
    and McLaughlin 1963).
    """
    quarter = len(seconds) // 4
    middle = np.sort(seconds, axis=0)[quarter : len(seconds) - quarter]
    own_s, all_s = middle.mean(axis=0).tolist()
    deviation = float(seconds[:, 0].clip(middle[0, 0], middle[-1, 0]).std())
    return Cost(own_s, all_s, deviation / (0.5 * math.sqrt(len(seconds))))


async def scrape_s(num_blocks: int) -> float:
    """Seconds of a scrape with a pool of this size."""
    async with running([], turnover=False, num_blocks=num_blocks) as runner:
        for _ in range(4):
            await runner.turn()
        registry = CollectorRegistry()
        registry.register(EngineCollector(runner.engine, RequestMetrics(), prefix_cache=True))
        times = []
        for _ in range(21):
            begun = time.thread_time()
            generate_latest(registry)
            times.append(time.thread_time() - begun)
    return statistics.median(times)


def show(names: list[list[str]], turns: int) -> str:
    """Both tables."""
    steady = asyncio.run(compare(names, turns, turnover=False))
    alone = steady.alone
    lines = [
        f"{RUNNING} running decodes; a step of the manager alone: {alone.own_s * 1e6:.0f} us of its thread, "
        f"{alone.all_s * 1e6:.0f} us of all threads",
        "",
        f"{_HEAD} {'of own step':>12}" + "".join(f"{f'of {ms} ms':>11}" for ms in STEP_MS),
    ]
    for parts, cost in zip(names, steady.added, strict=True):
        shares = "".join(f"{cost.own_s / ms * 1e5:10.2f}%" for ms in STEP_MS)
        lines.append(f"{_title(parts)} {_times(cost)} {cost.own_s / alone.own_s * 100:11.1f}%{shares}")
    lines.append("")
    for ms in STEP_MS:
        over = [
            _title(parts).strip() for parts, cost in zip(names, steady.added, strict=True) if cost.own_s > ms * 1e-5
        ]
        lines.append(f"over 1 % of {ms} ms: {', '.join(over) or 'none'}")
    turning = asyncio.run(compare(names, turns // 2, turnover=True))
    lines += [
        "",
        f"the same with {turning.requests:.1f} requests that begin and end in every step "
        f"({turning.alone.own_s * 1e6:.0f} us of the thread alone), what one of them adds:",
        "",
        _HEAD,
    ]
    for parts, cost, before in zip(names, turning.added, steady.added, strict=True):
        lines.append(f"{_title(parts)} {_times(cost.above(before, turning.requests))}")
    small, large = asyncio.run(scrape_s(20_000)), asyncio.run(scrape_s(1_000_000))
    lines += ["", f"a scrape: {small * 1e3:.1f} ms; of a pool of 1 M blocks: {large * 1e3:.1f} ms"]
    return "\n".join(lines)


_HEAD = f"{'part':14} {'thread':>17} {'all':>9}"


def _title(parts: list[str]) -> str:
    return f"{(parts[0] if len(parts) == 1 else 'all of them') if parts else 'nothing':14}"


def _times(cost: Cost) -> str:
    return f"{cost.own_s * 1e6:6.1f} us +-{cost.error_s * 1e6:5.1f} {cost.all_s * 1e6:6.1f} us"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--only", default="", help="only these parts, separated by commas, and not the run of all together"
    )
    parser.add_argument("--turns", type=int, default=40, help="turns of 64 steps, from 10 to 120 (default: 40)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if not 10 <= args.turns <= 120:
        parser.error(f"--turns: must be from 10 to 120, got {args.turns}")
    names = [[name] for name in PARTS if not args.only or name in args.only.split(",")]
    if not names or not set(filter(None, args.only.split(","))) <= set(PARTS):
        parser.error(f"--only: one of {', '.join(PARTS)}, got {args.only!r}")
    # Another engine without any part: how far off the figures are.
    names.insert(0, [])
    print(show([*names, *([] if args.only else [list(PARTS)])], args.turns))


if __name__ == "__main__":
    main()
