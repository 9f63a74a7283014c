"""`make soak`: two tenants with steady work, a third that floods, pries and sends what no client sends, and kills, for
two hours: memory stays flat, and nothing is held at the end.

Both processes are killed now and then in the first third; then the manager lives on to the end, and from the second
third on the executor, too. The memory of a process is judged over this last life of each: the median of its last
quarter beside that of the first, which begins once an eighth of the life is over. Exit status 0: all of it held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from chaos.run import ALARMS
from support.clients import everything_on
from support.clients.calls import Caller, request_for
from support.clients.memory import children, resident_mib
from support.clients.protected_stack import KEYS, ProtectedStack, key_section, protected_stack
from support.clients.stack import ORACLE, Process
from support.fuzz.calls import MANAGER_FILES, Methods, make_call, perform

from pagekv.client import AsyncPageKVClient, PageKVError
from pagekv.v1 import inference_service_pb2, operator_service_pb2

EXECUTOR = (*ORACLE, "--step-time-ms", "20")
MANAGER = ("--num-device-blocks=512", "--max-running=16", "--grace-s=5", "--step-timeout-s=30")
# The adversary is let in with less than would keep the others out.
TENANTS = """
[tenants.alice]
floor_blocks = 64

[tenants.bob]
floor_blocks = 64

[tenants.mallory]
max_running = 4
max_waiting = 16
max_watchers = 2
tokenized_bytes_per_second = 65536

[tenants.olga]
"""
VOCAB = 3000
# A tenant's prompts begin alike.
PREFIX = 64
OUTPUT = 40
# Statuses that answer what an adversary asks for, beside those that fuzzing allows.
DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED")
# Memory of a life's last quarter beside that of its first.
BAR = 1.05
# Descriptors and threads that an idle process may have more than it had when it was idle before: gRPC keeps a few.
SPARE = 8
PATIENCE_S = 240.0


@dataclass
class Account:
    """Calls, memory, and all that was wrong."""

    seconds: float
    calls: Counter[str] = field(default_factory=Counter)
    # Must stay empty.
    problems: list[str] = field(default_factory=list)
    # By name and life of a process: (seconds since the run's begin, MiB).
    memory: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    # MiB of the children of each process, at most: texts are read in one that ends when a call is given up.
    children: dict[str, float] = field(default_factory=dict)
    # By name of a process: descriptors and threads when idle, before and after.
    held: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def last_life(self, name: str) -> list[tuple[float, float]]:
        """Samples of the life that lasts to the end."""
        return self.memory[name, max(life for process, life in self.memory if process == name)]

    def growth(self, name: str) -> tuple[float, float, float]:
        """Of the last life: MiB of the first quarter and of the last one, and seconds between their begins."""
        samples = self.last_life(name)
        begin, end = samples[0][0], samples[-1][0]
        start = begin + (end - begin) / 8
        quarter = (end - start) / 4
        first = [mib for at, mib in samples if start <= at <= start + quarter]
        last = [mib for at, mib in samples if at >= end - quarter]
        return statistics.median(first), statistics.median(last), end - quarter - start

    def table(self) -> str:
        """For people."""
        lines = [f"{what:40}{count:>9}" for what, count in sorted(self.calls.items())]
        for name in ("manager", "executor"):
            first, last, seconds = self.growth(name)
            lines.append(f"{name}, MiB: {first:.1f}, {seconds:.0f} s later {last:.1f}, {last / first:.3f} times")
            lives = [statistics.median(mib for _, mib in self.memory[key]) for key in self.memory if key[0] == name]
            lines.append(f"  medians of its {len(lives)} lives: {min(lives):.1f} to {max(lives):.1f} MiB")
            lines.append(f"  its children: {self.children[name]:.1f} MiB at most")
            lines.append(f"  descriptors and threads, idle: {self.held[name]}")
        lines.append(f"problems: {len(self.problems)}")
        return "\n".join([*lines, *(f"  {what}" for what in self.problems[:50])])


class Soak:
    """A stack, its callers, and what is done to it."""

    def __init__(self, protected: ProtectedStack, account: Account, seed: int) -> None:
        self._protected, self._account = protected, account
        self._stack = protected.stack
        self._rng = random.Random(seed)
        self._closing = asyncio.Event()
        self._begin = time.monotonic()
        self._lives = Counter[str]()
        self._answers: dict[tuple[str, int], tuple[int, ...]] = {}

    def _credentials(self, name: str) -> grpc.ChannelCredentials:
        key = grpc.access_token_call_credentials(KEYS.get(name, f"{name}-key"))
        return grpc.composite_channel_credentials(self._protected.credentials(self._protected.client_pair), key)

    # -- callers

    async def _tenant(self, name: str) -> None:
        """One request after the other; equal requests bring equal tokens, whatever happens beside them."""
        rng = random.Random(name)
        prefix = [rng.randrange(1, VOCAB) for _ in range(PREFIX)]
        credentials = self._credentials(name)
        async with AsyncPageKVClient(self._stack.target, resume_timeout=PATIENCE_S, credentials=credentials) as client:
            while not self._closing.is_set():
                nth = rng.randrange(50)
                prompt = [*prefix, *random.Random(f"{name} {nth}").choices(range(1, VOCAB), k=24)]
                try:
                    answer = await client.generate(
                        prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, request_id=f"{name}-{nth}"
                    )
                except PageKVError as error:
                    self._account.problems.append(f"{name}: {type(error).__name__}: {error}")
                    await asyncio.sleep(1)
                    continue
                tokens = tuple(answer.token_ids)
                if len(tokens) != OUTPUT or self._answers.setdefault((name, nth), tokens) != tokens:
                    self._account.problems.append(f"{name}: request {nth} was answered with {len(tokens)} other tokens")
                self._account.calls[f"{name}: whole answers"] += 1
                await self._pause(rng.uniform(0.1, 0.6))

    async def _flood(self) -> None:
        """As many calls at once as the adversary may make, and more."""
        rng = random.Random("flood")
        async with Caller(self._stack.target, credentials=self._credentials("mallory")) as caller:
            while not self._closing.is_set():
                requests = [
                    request_for(rng.choices(range(1, VOCAB), k=rng.choice([8, 200, 600])), 24, ignore_eos=True)
                    for _ in range(24)
                ]
                ends = await asyncio.gather(*(caller.generate(each) for each in requests), return_exceptions=True)
                self._note("mallory's flood", ends, "OK RESOURCE_EXHAUSTED UNAVAILABLE INVALID_ARGUMENT")
                await self._pause(rng.uniform(2, 6))

    async def _pry(self) -> None:
        """Asks for what belongs to others, and sends messages of every shape."""
        rng, methods = random.Random("pry"), Methods.of(MANAGER_FILES)
        async with Caller(self._stack.target, credentials=self._credentials("mallory")) as caller:
            while not self._closing.is_set():
                ids = [f"{name}-{nth}" for name in ("alice", "bob") for nth in range(50)]
                with suppress(grpc.aio.AioRpcError):
                    aborted = await caller.inference.Abort(inference_service_pb2.AbortRequest(request_ids=ids))
                    if aborted.aborted_request_ids:
                        self._account.problems.append(f"mallory aborted {list(aborted.aborted_request_ids)}")
                denied = [
                    await asyncio.gather(call, return_exceptions=True)
                    for call in (
                        caller.operator.ListRequests(operator_service_pb2.ListRequestsRequest(), timeout=60),
                        caller.operator.ListBlocks(operator_service_pb2.ListBlocksRequest(), timeout=60),
                        caller.operator.ResetPrefixCache(operator_service_pb2.ResetPrefixCacheRequest(), timeout=60),
                    )
                ]
                self._note("mallory pries", [end for (end,) in denied], "PERMISSION_DENIED UNAVAILABLE")
                for _ in range(20):
                    wrong = await perform(caller.channel, make_call(rng, methods))
                    allowed = not wrong or wrong.startswith(DENIED)
                    self._account.calls["mallory's hostile messages"] += 1
                    if not allowed:
                        self._account.problems.append(f"a hostile message: {wrong}")
                    await asyncio.sleep(0.02)
                await self._pause(rng.uniform(0.5, 2))

    def _note(self, what: str, ends: Sequence[object], allowed: str) -> None:
        for end in ends:
            code = end.code().name if isinstance(end, grpc.aio.AioRpcError) else "OK"
            unexpected = isinstance(end, BaseException) and not isinstance(end, grpc.aio.AioRpcError)
            self._account.calls[f"{what}: {code}"] += 1
            if unexpected or code not in allowed.split():
                self._account.problems.append(f"{what}: {code}: {end!r}"[:500])

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    # -- what is done and seen

    def _processes(self) -> Iterator[tuple[str, Process]]:
        yield from (("manager", self._stack.manager), ("executor", self._stack.executor))

    async def _sample(self, every_s: float) -> None:
        while not self._closing.is_set():
            for name, process in self._processes():
                # A process that is being killed, or that has just begun.
                with suppress(OSError, AssertionError):
                    pid = process.pid
                    lives = self._account.memory.setdefault((name, self._lives[name]), [])
                    lives.append((time.monotonic() - self._begin, resident_mib(pid, "VmRSS")))
                    mib = sum(resident_mib(each, "VmRSS") for each in children(pid))
                    self._account.children[name] = max(mib, self._account.children.get(name, 0.0))
            await self._pause(every_s)

    async def _kills(self, every_s: float) -> None:
        """Both in the first third, the executor in the second."""
        seconds = self._account.seconds
        while (at := time.monotonic() - self._begin) < 2 / 3 * seconds and not self._closing.is_set():
            await self._pause(every_s * self._rng.uniform(0.7, 1.3))
            at = time.monotonic() - self._begin
            names = ["executor", "manager"] if at < seconds / 3 else ["executor"] if at < 2 / 3 * seconds else []
            for name in names:
                process = dict(self._processes())[name]
                await asyncio.to_thread(process.kill)
                await asyncio.to_thread(process.start, process.port)
                await asyncio.to_thread(process.wait_serving)
                self._lives[name] += 1
                self._account.calls[f"{name} killed"] += 1
                self._say(f"{name} killed")

    def _say(self, what: str) -> None:
        sizes = [f"{name} {self._account.memory[name, life][-1][1]:.1f} MiB" for name, life in self._lives_now()]
        print(f"{time.monotonic() - self._begin:7.0f} s  {what}; {', '.join(sizes)}", flush=True)

    def _lives_now(self) -> Iterator[tuple[str, int]]:
        for name in ("manager", "executor"):
            if (name, self._lives[name]) in self._account.memory:
                yield name, self._lives[name]

    async def _work(self, seconds: float, kill_every_s: float, sample_every_s: float) -> None:
        self._closing.clear()
        async with asyncio.TaskGroup() as tasks:
            for lane in (self._tenant("alice"), self._tenant("bob"), self._flood(), self._pry()):
                tasks.create_task(lane)
            if kill_every_s:
                tasks.create_task(self._sample(sample_every_s))
                tasks.create_task(self._kills(kill_every_s))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(min(60.0, max(0.0, end - time.monotonic())))
                self._say("")
            self._closing.set()

    async def _idle(self) -> None:
        """Waits until nothing is under way, and looks what is held then."""
        async with Caller(self._stack.target, credentials=self._stack.callers) as caller:
            stats = await caller.stats_when(
                lambda stats: not (stats.running_sequences or stats.waiting_sequences or stats.pins), PATIENCE_S
            )
            requests = await caller.operator.ListRequests(operator_service_pb2.ListRequestsRequest(), timeout=60)
        held = {
            "blocks in use": stats.num_device_blocks - stats.free_blocks,
            "pinned blocks": stats.pinned_blocks,
            # The publisher of KV events is one.
            "watchers": stats.watchers - int(everything_on.ASKED_FOR),
            "requests": len(requests.requests),
            "hash alarms": stats.hash_alarms_total,
        }
        self._account.problems += [f"held at the end: {count} {what}" for what, count in held.items() if count]
        # Connections that were closed are gone a moment later.
        await asyncio.sleep(5)
        for name, process in self._processes():
            folder = Path(f"/proc/{process.pid}")
            count = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
            self._account.held.setdefault(name, []).append(count)

    async def run(self, kill_every_s: float, warm_up_s: float) -> None:
        """To the end of the time."""
        await self._work(warm_up_s, 0, 0)
        await self._idle()
        self._begin = time.monotonic()
        await self._work(self._account.seconds, kill_every_s, min(5.0, self._account.seconds / 100))
        await self._idle()
        for name, ((files, threads), (files_after, threads_after)) in self._account.held.items():
            if files_after > files + SPARE or threads_after > threads + SPARE:
                self._account.problems.append(f"{name}: descriptors and threads are left: {self._account.held[name]}")
        for name, _ in self._processes():
            first, last, _ = self._account.growth(name)
            if last > BAR * first:
                self._account.problems.append(f"{name}: grew from {first:.1f} to {last:.1f} MiB")


def soak(seconds: float, seed: int, kill_every_s: float, warm_up_s: float) -> Account:
    """Runs it. Raises only when the stack cannot be run at all."""
    account = Account(seconds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "tenants.toml").write_text(TENANTS)
        mallory = key_section("mallory", "mallory-key", ["generate"])
        flags = [*MANAGER, f"--tenants={folder / 'tenants.toml'}"]
        with protected_stack(folder, EXECUTOR, flags, [mallory]) as protected:
            asyncio.run(Soak(protected, account, seed).run(kill_every_s, warm_up_s))
        for log in sorted(folder.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            found = [line for line in lines if any(alarm in line for alarm in ALARMS)]
            account.problems += [f"{log.name}: {line}" for line in found[:10]]
    return account


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200, help="how long, behind a warm-up [7200]")
    parser.add_argument("--kill-every", type=float, default=240, metavar="SECONDS", help="about [240]")
    parser.add_argument("--warm-up", type=float, default=60, metavar="SECONDS", help="before anything is counted [60]")
    parser.add_argument("--seed", type=int, default=0, help="the moments of kills [0]")
    args = parser.parse_args()
    if not 30 <= args.seconds <= 86400 or args.kill_every <= 0 or args.warm_up <= 0:
        parser.error("--seconds must be from 30 to 86400, --kill-every and --warm-up above 0")
    account = soak(args.seconds, args.seed, args.kill_every, args.warm_up)
    print(account.table())
    return 1 if account.problems else 0


if __name__ == "__main__":
    sys.exit(main())
