"""The faults of chaos, one at a time: each fault leaves both processes running, and says how long it took until
there were new tokens again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from chaos.clients import Clients
from support.clients.calls import Caller, aio_channel, request_for
from support.clients.stack import Process, Stack

from pagekv.common.models import resolve_model
from pagekv.steps.v1 import executor_service_pb2 as executor_pb
from pagekv.v1 import operator_service_pb2 as operator_pb

Recovery = float | None
# Allowed refusals of a step that is none of the manager's.
REFUSALS = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)
# Seconds that a recovery may take on a machine that does a lot besides.
PATIENCE_S = 240.0


@dataclass
class Chaos:
    """A stack under work, and what is done to it."""

    stack: Stack
    clients: Clients
    rng: random.Random
    # The manager's --step-timeout-s.
    step_timeout_s: float
    directory: Path
    # Faults that did not go as they must, in words.
    problems: list[str] = field(default_factory=list)

    # -- the executor

    async def kill_executor(self) -> Recovery:
        """SIGKILL, and another one in its place."""
        begin = await self._mark()
        await asyncio.to_thread(self.stack.executor.kill)
        await self._shown("the executor was killed")
        await asyncio.to_thread(self.stack.executor.start, self.stack.executor.port)
        return await self._recovered(begin)

    async def kill_executor_twice(self) -> Recovery:
        """The second time while it loads, is attached or computes its first steps."""
        begin = await self._mark()
        for _ in range(2):
            await asyncio.to_thread(self.stack.executor.kill)
            await asyncio.to_thread(self.stack.executor.start, self.stack.executor.port)
            await asyncio.sleep(self.rng.uniform(0, 0.5))
        return await self._recovered(begin)

    async def stop_executor(self) -> Recovery:
        """SIGTERM: it ends its step, says that it goes, and exits 0."""
        begin = await self._mark()
        status = await asyncio.to_thread(self.stack.executor.stop)
        if status:
            self.problems.append(f"the executor exited with {status} on SIGTERM")
        await asyncio.to_thread(self.stack.executor.start, self.stack.executor.port)
        return await self._recovered(begin)

    async def hang_executor(self) -> Recovery:
        """SIGSTOP until the step is overdue; then it goes on, and must not disturb the next epoch."""
        begin = await self._mark()
        self._signal(self.stack.executor, signal.SIGSTOP)
        await self._shown("the executor hangs")
        self._signal(self.stack.executor, signal.SIGCONT)
        return await self._recovered(begin)

    async def replace_hung_executor(self) -> Recovery:
        """SIGSTOP until the step is overdue, then SIGKILL and another one in its place."""
        begin = await self._mark()
        self._signal(self.stack.executor, signal.SIGSTOP)
        await self._shown("the executor hangs")
        await asyncio.to_thread(self.stack.executor.kill)
        await asyncio.to_thread(self.stack.executor.start, self.stack.executor.port)
        return await self._recovered(begin)

    async def halt_executor(self) -> Recovery:
        """SIGSTOP for less than the step timeout: a pause and nothing else."""
        begin = await self._mark()
        self._signal(self.stack.executor, signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.05, 0.5) * self.step_timeout_s)
        self._signal(self.stack.executor, signal.SIGCONT)
        return await self._recovered(begin)

    async def kill_rank(self) -> Recovery:
        """SIGKILL of one rank of a group, any: the others end by themselves, and torchrun starts all anew."""
        begin = await self._mark()
        os.kill(await self._rank(), signal.SIGKILL)
        await self._shown("a rank was killed")
        return await self._recovered(begin)

    async def hang_rank(self) -> Recovery:
        """SIGSTOP of one rank, for good."""
        begin = await self._mark()
        os.kill(await self._rank(), signal.SIGSTOP)
        await self._shown("a rank hangs")
        return await self._recovered(begin)

    async def cut_rank_off(self) -> Recovery:
        """Nothing gets to the ranks from rank 0, nor back, until rank 0 has ended."""
        begin = await self._mark()
        relay = self.stack.executor.relay
        assert relay is not None
        await self._rank()
        with relay.cut():
            await self._shown("a rank was cut off")
        return await self._recovered(begin)

    async def kill_rank_for_one_with_another_model(self) -> Recovery:
        """SIGKILL of one rank; those that come then refuse each other, until all have one model again."""
        begin = await self._mark()
        executor, model = self.stack.executor, self.directory / "other_model"
        if not model.is_dir():
            shutil.copytree(resolve_model("demo"), model)
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps({**config, "_another": True}))
        said = self._num_said(executor, "differ in the model's fingerprint")
        executor.other_flags.write_text(f"--model {model}")
        try:
            os.kill(await self._rank(), signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE_S
            while self._num_said(executor, "differ in the model's fingerprint") == said:
                if time.monotonic() > deadline:
                    self.problems.append("ranks with two models did not refuse each other")
                    break
                await asyncio.sleep(0.05)
        finally:
            executor.other_flags.unlink()
        return await self._recovered(begin)

    @staticmethod
    def _num_said(process: Process, words: str) -> int:
        return process.log.read_text(errors="replace").count(words)

    async def _rank(self) -> int:
        """The process of a rank."""
        deadline = time.monotonic() + PATIENCE_S
        while len(pids := self.stack.executor.rank_pids()) < self.stack.executor.ranks:
            assert time.monotonic() < deadline, "the ranks are not there"
            await asyncio.sleep(0.05)
        return self.rng.choice(list(pids.values()))

    async def send_bad_steps(self) -> Recovery:
        """Steps of an epoch that is over, before its beginning, from nowhere and of the one that the manager drives,
        and bytes that are no message: each is refused whole while the manager's steps go on.
        """
        begin = await self._mark()
        epoch = self.rng.choice([0, 1, time.time_ns() - 10**9, 2**64 - 1, self._live_epoch(), self._live_epoch()])
        step = executor_pb.StepRequest(epoch=epoch, step=self.rng.randrange(3), finished_seqs=[0, 1, 2])
        step.memory_ops.add(kind=executor_pb.MEMORY_OP_KIND_COPY, sources=[0, 1], destinations=[2, 3])
        raw = step.SerializeToString()
        truncated = raw[: self.rng.randrange(1, len(raw))]
        executor = self.stack.executor
        async with aio_channel(executor.target, executor.credentials) as channel:
            # No serialisers: bytes as they are.
            run: Any = channel.stream_stream("/pagekv.steps.v1.ExecutorService/Run")
            for data in (raw, truncated, bytes(self.rng.randrange(256) for _ in range(50))):
                call = run(timeout=PATIENCE_S)
                try:
                    await call.write(data)
                    await call.done_writing()
                    answers = [answer async for answer in call]
                    self.problems.append(f"a bad step was answered: {answers}")
                except grpc.aio.AioRpcError as error:
                    if error.code() not in REFUSALS:
                        self.problems.append(f"a bad step was refused with {error.code()}: {error.details()}")
        return await self._recovered(begin)

    def _live_epoch(self) -> int:
        """Of the manager that drives the executor, as the executor's log says: its stream is bound, no other may be."""
        epochs = re.findall(r"attached.*\bepoch=(\d+)", self.stack.executor.log.read_text(errors="replace"))
        return int(epochs[-1])

    # -- the manager

    async def kill_manager(self) -> Recovery:
        """SIGKILL, and another one in its place."""
        begin = time.monotonic()
        with self.clients.manager_killed():
            await asyncio.to_thread(self.stack.manager.kill)
            await asyncio.to_thread(self.stack.manager.start, self.stack.manager.port)
        return await self._recovered((begin, 0, 0))

    async def fill_disk_of_manager_log(self) -> Recovery:
        """SIGKILL, and another one that cannot write a line of its log: it serves as any. Then one that can."""
        log, manager = self.stack.manager.log, self.stack.manager
        try:
            manager.log = Path("/dev/full")
            took = await self.kill_manager()
            await asyncio.sleep(self.rng.uniform(0, 2.0))
        finally:
            manager.log = log
        await self.kill_manager()
        return took

    async def stop_manager(self) -> Recovery:
        """SIGTERM: streams under way end, new ones are refused, it exits 0; then another one in its place."""
        begin = time.monotonic()
        with self.clients.manager_stopped():
            status = await asyncio.to_thread(self.stack.manager.stop, PATIENCE_S)
            if status:
                self.problems.append(f"the manager exited with {status} on SIGTERM")
            await asyncio.to_thread(self.stack.manager.start, self.stack.manager.port)
        return await self._recovered((begin, 0, 0))

    async def rival_manager(self) -> Recovery:
        """A second manager takes the executor over for some requests of its own and is killed: the first one waits."""
        begin = await self._mark()
        args = ["--executor", self.stack.executor.target, "--take-over", "--num-device-blocks", "64"]
        args += self.stack.secured
        directory = self.directory / "rival"
        directory.mkdir(exist_ok=True)
        rival = Process("pagekv.kvmanager", args, directory, credentials=self.stack.manager.credentials)
        await asyncio.to_thread(rival.start)
        try:
            await asyncio.to_thread(rival.wait_serving)
            async with Caller(rival.target, credentials=self.stack.callers) as caller:
                results = await caller.generate_many([request_for([5, 6, 7], 20, ignore_eos=True)] * 3)
            if len({tuple(result.tokens) for result in results}) != 1:
                self.problems.append("the rival's own streams differ from each other")
            # At once, or when it has heard.
            if not await self._not_serving():
                self.problems.append("both managers say that they serve")
        finally:
            await asyncio.to_thread(rival.kill)
        return await self._recovered(begin)

    # -- clients and cache

    async def flood(self) -> Recovery:
        """More calls at once than the queue takes: each is served, or refused with a delay to come back after."""
        request = request_for([self.rng.randrange(1, 3000) for _ in range(20)], 3, ignore_eos=True)
        outcomes = []
        async with Caller(self.stack.target, credentials=self.stack.callers) as caller:
            calls = [caller.generate(request, PATIENCE_S) for _ in range(300)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        tokens = {tuple(outcome.tokens) for outcome in outcomes if not isinstance(outcome, BaseException)}
        if len(tokens) > 1:
            self.problems.append("equal requests of a flood were answered differently")
        for outcome in outcomes:
            if isinstance(outcome, grpc.aio.AioRpcError):
                details = dict(outcome.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
                if outcome.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or b"RetryInfo" not in details:
                    self.problems.append(f"a call of a flood: {outcome.code()}: {outcome.details()}")
            elif isinstance(outcome, BaseException):
                self.problems.append(f"a call of a flood: {outcome!r}")
        return None

    async def reset_cache(self) -> Recovery:
        """Forgets the prefix table, for which everything running is preempted."""
        begin = await self._mark()
        async with Caller(self.stack.target, credentials=self.stack.callers) as caller:
            await caller.operator.ResetPrefixCache(operator_pb.ResetPrefixCacheRequest(force=True), timeout=PATIENCE_S)
        return await self._recovered(begin)

    # -- how it goes

    @staticmethod
    def _signal(process: Process, signum: signal.Signals) -> None:
        assert process.popen is not None
        process.popen.send_signal(signum)

    @staticmethod
    async def _stats(caller: Caller) -> operator_pb.GetStatsResponse | None:
        try:
            return await caller.operator.GetStats(operator_pb.GetStatsRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return None

    async def _mark(self) -> tuple[float, int, int]:
        """Waits until tokens are coming, so that the fault hits work; now, tokens and epochs so far."""
        stats = await self._until(lambda stats: stats.running_sequences > 0 and stats.executor_attached)
        return time.monotonic(), stats.generated_tokens_total, stats.executor_restarts_total

    async def _recovered(self, mark: tuple[float, int, int]) -> float:
        """Waits for new tokens; seconds since the mark. If the epoch is lost, for those of the next one."""
        begin, tokens, _ = mark
        after = await self._until(lambda stats: stats.executor_attached)
        floor = max(tokens, after.generated_tokens_total)
        await self._until(lambda stats: stats.generated_tokens_total > floor)
        return time.monotonic() - begin

    async def _until(self, condition: Callable[[operator_pb.GetStatsResponse], bool]) -> operator_pb.GetStatsResponse:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            # A new connection where one has failed: an old one would wait before it tries again.
            async with Caller(self.stack.target, credentials=self.stack.callers) as caller:
                while (stats := await self._stats(caller)) is not None and time.monotonic() < deadline:
                    if condition(stats):
                        return stats
                    await self._while_both_run()
            await self._while_both_run()
        raise AssertionError(f"the stack did not come back; the manager's log:\n{self.stack.manager.tail(80)}")

    async def _while_both_run(self) -> None:
        """A moment, in which neither process has ended."""
        for process in (self.stack.executor, self.stack.manager):
            if process.popen is None or process.popen.poll() is not None:
                raise AssertionError(f"{process.module} ended by itself; its log:\n{process.tail(80)}")
        await asyncio.sleep(0.02)

    async def _shown(self, what: str) -> None:
        """The manager's health has to say so."""
        if not await self._not_serving():
            self.problems.append(f"the manager's health did not show that {what}")

    async def _not_serving(self) -> bool:
        """Waits for health to show a loss; False when it does not."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        deadline = time.monotonic() + PATIENCE_S
        async with aio_channel(self.stack.target, self.stack.callers) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return True
                await asyncio.sleep(0.01)
        return False


# By name, with how often it is drawn compared to others.
FAULTS: dict[str, tuple[float, Callable[[Chaos], Awaitable[Recovery]]]] = {
    "executor-killed": (3, Chaos.kill_executor),
    "executor-killed-twice": (1, Chaos.kill_executor_twice),
    "executor-stopped": (1, Chaos.stop_executor),
    "executor-hung": (1, Chaos.hang_executor),
    "executor-hung-and-replaced": (1, Chaos.replace_hung_executor),
    "executor-halted-briefly": (1, Chaos.halt_executor),
    "bad-steps": (1, Chaos.send_bad_steps),
    "manager-killed": (3, Chaos.kill_manager),
    "manager-log-disk-full": (1, Chaos.fill_disk_of_manager_log),
    "manager-stopped": (1, Chaos.stop_manager),
    "manager-rivalled": (1, Chaos.rival_manager),
    "flood": (1, Chaos.flood),
    "cache-reset": (1, Chaos.reset_cache),
}

# Of a group of ranks; besides them those of FAULTS that leave torchrun alone, or kill it with all its ranks.
RANK_FAULTS: dict[str, tuple[float, Callable[[Chaos], Awaitable[Recovery]]]] = {
    "rank-killed": (6, Chaos.kill_rank),
    "rank-hung": (1, Chaos.hang_rank),
    "rank-cut-off": (1, Chaos.cut_rank_off),
    "rank-of-another-model": (1, Chaos.kill_rank_for_one_with_another_model),
    **{
        name: FAULTS[name]
        for name in ("executor-killed", "bad-steps", "manager-killed", "manager-rivalled", "flood", "cache-reset")
    },
}
