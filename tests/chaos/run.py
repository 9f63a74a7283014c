"""One chaos run: a stack, clients that never rest, faults at random, and the account at the end."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chaos.clients import Clients, undisturbed
from chaos.faults import FAULTS, RANK_FAULTS, Chaos
from chaos.requests import difference, make_specs
from support.clients.calls import Caller
from support.clients.protected_stack import protected_stack
from support.clients.stack import CPU, ORACLE, Stack, running_executor, running_manager

# Words of a log that must not be in it: what both sides say when a promise of the other was broken.
ALARMS = ("broken invariant", "a step failed", "refused a step", "unexpected error", "Traceback", "gave up")
# A fault sends bytes that are no step on a stream of its own, which belongs to no epoch; only a manager's are an alarm.
STRANGERS_STEP = "refused a step epoch=0 "


@dataclass(frozen=True)
class Options:
    """The options of `python -m chaos`."""

    seconds: float
    seed: int
    backend: str = "oracle"
    lanes: int = 32
    # Names of FAULTS.
    faults: tuple[str, ...] = tuple(FAULTS)
    # Faults to inject, within the time; 0: as many as the time allows.
    count: int = 0
    # Different requests.
    requests: int = 48
    # Mutual TLS and a key at every port.
    tls: bool = False
    # Of the executor; above 1 faults are of RANK_FAULTS.
    ranks: int = 1

    @property
    def known_faults(self) -> dict[str, tuple[float, Callable[[Chaos], Awaitable[float | None]]]]:
        """By name."""
        return FAULTS if self.ranks == 1 else RANK_FAULTS


@dataclass
class Account:
    """The faults done and the losses."""

    options: Options
    injected: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    streams: Counter[str] = field(default_factory=Counter)
    # Must stay empty: streams lost, faults that did not go as they must, alarms in logs, blocks that did not come back.
    lost: list[str] = field(default_factory=list)
    manager_args: str = ""
    preemptions: int = 0
    manager_peak_mib: int = 0

    def short(self, named: Collection[str] = ()) -> str:
        """Which faults were asked for by count or by name and not injected, in one line; "": none."""
        if never := [name for name in named if not self.injected[name]]:
            return f"never injected within {self.options.seconds:g} s: {', '.join(never)}"
        if (total := self.injected.total()) < self.options.count:
            return f"{total} of {self.options.count} faults were injected within {self.options.seconds:g} s"
        return ""

    def table(self) -> str:
        """For people."""
        lines = [f"{'fault':28}{'injected':>9}   until new tokens, s: median, most"]
        for name in self.options.faults:
            times = self.recoveries[name]
            shown = f"{statistics.median(times):12.2f}{max(times):8.2f}" if times else ""
            lines.append(f"{name:28}{self.injected[name]:>9}{shown}")
        lines.append("")
        lines += [f"{'streams ' + what:28}{count:>9}" for what, count in sorted(self.streams.items())]
        lines.append(f"{'preemptions':28}{self.preemptions:>9}   of the last manager")
        lines.append(f"{'memory of the manager, MiB':28}{self.manager_peak_mib:>9}   at most, of the last one")
        lines.append(f"{'lost':28}{len(self.lost):>9}{'   nothing' if not self.lost else ''}")
        lines.append(f"manager: {self.manager_args}")
        return "\n".join([*lines, *(f"  {what}" for what in self.lost[:50])])


async def chaos(options: Options, say: bool = True) -> Account:
    """Runs to the end of the time or the count. Raises only when the stack cannot be run at all."""
    account = Account(options)
    rng = random.Random(options.seed)
    oracle = options.backend == "oracle"
    longest = 100 if oracle else 40
    specs = make_specs(random.Random(f"{options.seed} requests"), options.requests, longest)
    # Far above what a step takes on a busy machine: three overdue ones in a row end a request.
    step_timeout_s = 5.0 if oracle else 15.0
    executor_args = [*ORACLE, "--step-time-ms", "3"] if oracle else list(CPU)
    if options.ranks > 1:
        executor_args += ["--rank-timeout-s", str(step_timeout_s / 2)]
    # Fewer sequences at once than clients, a pool that makes them preempt each other, a queue that floods overrun.
    manager_args = ["--num-device-blocks", "110", "--max-running", "24", "--max-queue", "128"]
    # A preempted sequence goes to a host pool that is too small for all, or is recomputed, as the seed says.
    manager_args += ["--preemption", rng.choice(["swap", "recompute", "auto"]), "--num-host-blocks", "100"]
    manager_args += rng.choice([["--write-back"], []])
    manager_args += ["--step-timeout-s", str(step_timeout_s), "--grace-s", "200"]
    with (
        tempfile.TemporaryDirectory() as temporary,
        _stack(options, Path(temporary), executor_args, manager_args) as stack,
    ):
        wanted = await undisturbed(stack, specs)
        clients = Clients(stack, specs, wanted, options.seed)
        bench = Chaos(stack, clients, rng, step_timeout_s, Path(temporary))
        running = asyncio.create_task(clients.run(options.lanes))
        try:
            await _inject(bench, account, say)
        finally:
            clients.closing.set()
        await running
        account.streams = clients.tally.counts
        account.lost += clients.tally.lost + bench.problems
        await _settle(stack, account)
        for spec, answers, before in zip(specs, await undisturbed(stack, specs), wanted, strict=True):
            if wrong := difference(spec, answers, before, whole=True):
                account.lost.append(f"afterwards: {wrong}")
        account.manager_peak_mib = _peak_mib(stack)
        account.lost += _alarms(Path(temporary))
    account.manager_args = " ".join(manager_args)
    return account


@contextmanager
def _stack(options: Options, folder: Path, executor_args: list[str], manager_args: list[str]) -> Iterator[Stack]:
    if options.tls:
        with protected_stack(folder, executor_args, manager_args) as protected:
            yield protected.stack
    else:
        with (
            running_executor(executor_args, folder, ranks=options.ranks, relayed=options.ranks > 1) as executor,
            running_manager(executor, manager_args) as stack,
        ):
            yield stack


async def _inject(bench: Chaos, account: Account, say: bool) -> None:
    """Fault after fault, each at a random moment after the one before was recovered from."""
    options, rng = account.options, bench.rng
    begin = time.monotonic()
    # Every kind once, in random order; then at random.
    order = rng.sample(options.faults, len(options.faults))
    weights = [options.known_faults[name][0] for name in options.faults]
    most = options.count or sys.maxsize
    while time.monotonic() - begin < options.seconds and account.injected.total() < most:
        name = order.pop() if order else rng.choices(options.faults, weights)[0]
        await asyncio.sleep(rng.uniform(0, 1.0))
        took = await options.known_faults[name][1](bench)
        account.injected[name] += 1
        if took is not None:
            account.recoveries[name].append(took)
        if say:
            shown = "" if took is None else f", new tokens after {took:.2f} s"
            print(f"{time.monotonic() - begin:7.1f} s  {name}{shown}", flush=True)


async def _settle(stack: Stack, account: Account) -> None:
    """Nothing runs any more: every block must be back."""
    async with Caller(stack.target, credentials=stack.callers) as caller:
        stats = await caller.idle_stats()
    account.preemptions = stats.preemptions_total
    if stats.free_blocks != stats.num_device_blocks:
        account.lost.append(f"{stats.num_device_blocks - stats.free_blocks} blocks did not come back")
    if stats.hash_alarms_total:
        account.lost.append(f"{stats.hash_alarms_total} hash alarms")


def _peak_mib(stack: Stack) -> int:
    status = Path(f"/proc/{stack.manager.pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _alarms(directory: Path) -> list[str]:
    found = []
    for log in sorted(directory.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if any(alarm in line for alarm in ALARMS) and STRANGERS_STEP not in line:
                found.append(f"{log.name}:{number + 1}: " + "\n    ".join(lines[number : number + 12]))
    return found
