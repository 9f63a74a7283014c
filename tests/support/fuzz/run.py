"""One run of the fuzzer: real processes, lanes of cases made from a seed, an innocent stream beside them, the bounds.

A case is named by its port and number and made from these and the seed alone, so a seed, a port and a number are all
that is needed to make it again.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from support.clients.calls import Caller, request_for
from support.clients.deaf_client import deaf_call
from support.clients.stack import EXECUTOR, MANAGER, ORACLE
from support.clients.watched_process import WatchedProcess, running_watched
from support.fuzz import calls, frames, http_requests, messages, steps

from pagekv.v1 import operator_service_pb2 as operator_pb

MIB = 2**20
# Bounds. Of memory that is taken within a second: what one call may take, and twice the messages that are sent at once,
# which gRPC has as its own and as Python's bytes. Of memory that stays, beyond what there was after the first cases:
# gRPC's buffers and what the allocator keeps, as in `tests/e2e/test_overload.py`.
MOST_MIB = 32
MOST_KEPT_MIB = 64
MOST_IN_FLIGHT = 2 * messages.MOST_BYTES
# Of an event loop's silence, in processor time of its thread. One call holds it for some milliseconds; the cases of all
# lanes may come at once where the machine has let the process wait. Defects of this kind take seconds.
MOST_SILENT_S = 0.5
# Cases before the bounds are looked at: imports, caches and pools are not any call's.
WARM_UP = 2000
MOST_FAILURES = 5
# Cases whose names are remembered for a report.
REMEMBERED = 200
LANES = {"manager": 16, "executor": 4, "steps": 1, "spare": 4, "http": 24, "frames": 4}
# Streams of each process that somebody has open when it ends, in the order of their ends.
DEAF = {
    "manager": b"/pagekv.v1.OperatorService/WatchEvents",
    "executor": f"{steps.SERVICE}/Run".encode(),
    "spare": f"{steps.SERVICE}/Run".encode(),
}
# Tokens of the innocent stream.
PROMPT, LENGTH = [3, 1, 4, 1, 5, 9, 2, 6], 60


@dataclass(frozen=True)
class Options:
    """The options of `python -m support.fuzz`."""

    seed: int
    seconds: float
    # Messages of all ports together after which the run ends; 0: as many as the time allows.
    messages: int = 0
    # The only case to run, as often as the time allows: port and number.
    only: tuple[str, int] | None = None


@dataclass
class Account:
    """The messages sent and the figures found. `failures` must stay empty."""

    options: Options
    cases: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    innocent: int = 0
    seconds: float = 0.0
    # By process: seconds of silence, of a processor in a silence, MiB taken within a second, MiB kept.
    figures: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def table(self) -> str:
        """For people."""
        lines = [f"{'port':10}{'cases':>10}{'messages':>10}"]
        lines += [f"{port:10}{self.cases[port]:>10}{self.messages[port]:>10}" for port in self.cases]
        lines.append(f"{'all':10}{self.cases.total():>10}{self.messages.total():>10}  in {self.seconds:.0f} s")
        lines.append(f"{self.innocent} undisturbed answers beside them")
        lines += [
            f"{name}: silent for {1e3 * silence:.0f} ms, {1e3 * own:.0f} ms of its own; "
            f"{taken:.0f} MiB taken at once, {kept:.0f} kept"
            for name, (silence, own, taken, kept) in self.figures.items()
        ]
        return "\n".join([*lines, *self.failures])


@dataclass(frozen=True)
class Port:
    """One way in: how its cases are made, made use of and shown."""

    make: Callable[[random.Random], Any]
    perform: Callable[[Any], Awaitable[str]]
    show: Callable[[Any], str]


@contextmanager
def processes() -> Iterator[dict[str, WatchedProcess]]:
    """A manager, its executor, and a spare executor that no manager drives."""
    quiet = ("--log-level", "error")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with (
            running_watched(EXECUTOR, [*steps.EXECUTOR_ARGS, *quiet], directory, "spare") as spare,
            running_watched(EXECUTOR, [*ORACLE, "--kv-memory", "16MiB", *quiet], directory, "executor") as executor,
            running_watched(
                MANAGER,
                [
                    *("--executor", executor.target, "--http-listen", "127.0.0.1:0", "--gateway-api"),
                    *("--num-device-blocks", "512", "--grace-s", "20", *quiet),
                ],
                directory,
                "manager",
            ) as manager,
        ):
            yield {"manager": manager, "executor": executor, "spare": spare}


def case_of(seed: int, name: str, number: int, make: Callable[[random.Random], Any]) -> Any:
    """The case of this number."""
    return make(random.Random(f"{seed} {name} {number}"))


class _Failed(Exception):
    """Ends all lanes at once."""


class Fuzzer:
    """The lanes over running processes."""

    def __init__(self, options: Options, running: dict[str, WatchedProcess]) -> None:
        self.account = Account(options)
        self._options = options
        self._running = running
        self._under_way: dict[str, float] = {}
        self._latest: deque[str] = deque(maxlen=REMEMBERED)
        self._large = asyncio.Lock()
        self._over = asyncio.Event()
        self._numbers: Counter[str] = Counter()

    async def run(self) -> Account:
        """Returns when the time is over, enough messages were sent, or something failed."""
        options, account, begin = self._options, self.account, time.monotonic()
        async with self._ports() as ports, Caller(self._running["manager"].target) as caller:
            await caller.until_serving()
            expected = await caller.generate(request_for(PROMPT, LENGTH, ignore_eos=True))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._timer(options.seconds))
                    tasks.create_task(self._innocent(caller, expected.tokens))
                    tasks.create_task(self._watch())
                    for name, port in ports.items():
                        if options.only and options.only[0] != name:
                            continue
                        for _ in range(1 if options.only else LANES[name]):
                            tasks.create_task(self._lane(name, port))
            except* _Failed:
                pass
            account.seconds = time.monotonic() - begin
            if not account.failures:
                await self._look_for_leftovers(caller)
        if not account.failures:
            await self._end()
        return account

    def _fail(self, words: str) -> None:
        # The first ones: others follow from these.
        if len(self.account.failures) < MOST_FAILURES:
            self.account.failures.append(f"seed {self._options.seed}: {words}")
        self._over.set()

    async def _timer(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            self._over.set()
        if self.account.failures:
            await asyncio.sleep(1)  # for a process that is about to end
            for name, process in self._running.items():
                status, said = process.popen.poll(), process.log.read_text(errors="replace")
                self.account.failures.append(
                    f"{name}: {'runs' if status is None else f'ended with {status}'}; {said[-4000:]}"
                )
            raise _Failed

    # -- lanes

    @asynccontextmanager
    async def _ports(self) -> AsyncIterator[dict[str, Port]]:
        manager, executor, spare = (self._running[name] for name in ("manager", "executor", "spare"))
        served = calls.Methods.of(calls.MANAGER_FILES), calls.Methods.of(calls.EXECUTOR_FILES)
        options = calls.CONNECTION
        async with (
            grpc.aio.insecure_channel(manager.target, options=options) as to_manager,
            grpc.aio.insecure_channel(executor.target, options=options) as to_executor,
            grpc.aio.insecure_channel(spare.target, options=options) as to_spare,
            grpc.aio.insecure_channel(spare.target, options=options) as with_steps,
        ):

            def of_calls(methods: calls.Methods, channel: grpc.aio.Channel) -> Port:
                return Port(
                    lambda rng: calls.make_call(rng, methods), lambda case: calls.perform(channel, case), calls.shown
                )

            yield {
                "manager": of_calls(served[0], to_manager),
                "executor": of_calls(served[1], to_executor),
                "spare": of_calls(served[1], to_spare),
                "steps": Port(steps.make_steps, lambda case: steps.perform(with_steps, case), steps.shown),
                "http": Port(
                    http_requests.make_request,
                    lambda case: http_requests.perform(manager.http, case),
                    http_requests.shown,
                ),
                "frames": Port(
                    lambda rng: frames.make_connection(
                        rng, dict(zip(self._running, (*served, served[1]), strict=True))
                    ),
                    lambda case: frames.perform(self._running[case.port].target, case),
                    frames.shown,
                ),
            }

    async def _lane(self, name: str, port: Port) -> None:
        account, only = self.account, self._options.only
        while not self._over.is_set():
            self._numbers[name] += 1
            number = only[1] if only else self._numbers[name]
            case = case_of(self._options.seed, name, number, port.make)
            where = f"{name}:{number}"
            if case.size > messages.USUAL_BYTES * 2:
                # One at a time, so that what is in flight is known.
                async with self._large:
                    wrong = await self._performed(where, port, case)
            else:
                wrong = await self._performed(where, port, case)
            account.cases[name] += 1
            account.messages[name] += case.count
            if wrong:
                self._fail(f"--only {where} ended with {wrong}\n{port.show(case)}")
            if 0 < self._options.messages <= account.messages.total():
                self._over.set()

    async def _performed(self, where: str, port: Port, case: Any) -> str:
        self._under_way[where] = time.monotonic()
        self._latest.append(where)
        try:
            return await port.perform(case)
        finally:
            del self._under_way[where]

    async def _innocent(self, caller: Caller, expected: list[int]) -> None:
        while not self._over.is_set():
            try:
                result = await caller.generate(request_for(PROMPT, LENGTH, ignore_eos=True))
            except grpc.aio.AioRpcError as error:
                self._fail(f"the innocent stream ended with {error.code().name}: {error.details()}")
                return
            if result.tokens != expected:
                self._fail(f"the innocent stream got {result.tokens}, not {expected}")
            self.account.innocent += 1

    # -- bounds

    async def _watch(self) -> None:
        """Looks at each process every second."""
        begin, before = time.monotonic(), dict[str, int]()
        for process in self._running.values():
            process.figures()  # of the start
        over = False
        while not over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 1)
            over = self._over.is_set()
            warm = self.account.cases.total() >= WARM_UP or time.monotonic() > begin + self._options.seconds / 2
            for name, process in self._running.items():
                try:
                    figures = await asyncio.to_thread(process.figures)
                except RuntimeError as error:
                    self._fail(f"{error}\nunder way were {', '.join(self._under_way)}")
                    return
                if not warm:
                    continue
                kept = (figures.before_bytes - before.setdefault(name, figures.before_bytes)) / MIB
                found = figures.silence_s, figures.own_s, figures.taken_bytes / MIB, kept
                most = self.account.figures.get(name, found)
                self.account.figures[name] = tuple(map(max, found, most))  # type: ignore[assignment]  # four of them
                lately = " ".join(self._latest)
                if figures.own_s > MOST_SILENT_S:
                    self._fail(f"{name}'s event loop was busy for {figures.own_s:.2f} s; lately {lately}")
                if figures.taken_bytes / MIB > MOST_MIB + 2 * MOST_IN_FLIGHT / MIB:
                    self._fail(f"{name} took {figures.taken_bytes / MIB:.0f} MiB; lately {lately}")
                if kept > MOST_KEPT_MIB:
                    self._fail(f"{name} has {kept:.0f} MiB more than after the first cases")

    async def _look_for_leftovers(self, caller: Caller) -> None:
        """Everything that was taken is given back, and the manager has kept its executor."""
        await caller.operator.ResetPrefixCache(operator_pb.ResetPrefixCacheRequest(force=True), timeout=calls.HANG_S)
        stats = await caller.stats_when(lambda stats: not (stats.watchers or stats.unread_sequences))
        stats = await caller.idle_stats(calls.HANG_S)
        names = ("pins", "executor_restarts_total", "failed_requests_total", "hash_alarms_total")
        left = {name: getattr(stats, name) for name in names}
        left["blocks"] = stats.num_device_blocks - stats.free_blocks
        if any(left.values()):
            self._fail(f"left behind: {left}")

    async def _end(self) -> None:
        """Each process ends in order, whoever takes nothing of what is written to him, and has logged no error."""
        for name, method in DEAF.items():
            process = self._running[name]
            with ExitStack() as deaf:
                for path in (method, b"/grpc.health.v1.Health/Watch"):
                    deaf.enter_context(deaf_call(int(process.target.rpartition(":")[2]), path))
                process.popen.terminate()
                status = await asyncio.to_thread(process.popen.wait, calls.HANG_S)
            if status:
                self._fail(f"{name} ended with {status}")
            if said := process.log.read_text(errors="replace"):
                self._fail(f"{name} logged {len(said)} characters:\n{said[:4000]}")


async def fuzz(options: Options) -> Account:
    """One run."""
    with processes() as running:
        return await Fuzzer(options, running).run()
