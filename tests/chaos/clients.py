"""Clients of every temper, all at once: they go on through faults, and hold each answer against the undisturbed one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from chaos.requests import Answer, Answers, Spec, difference, take
from support.clients.calls import aio_channel
from support.clients.stack import Stack

from pagekv.client import AsyncPageKVClient, PageKVError
from pagekv.client.channel import channel_options
from pagekv.client.errors import ConnectionLost, Overloaded, Unavailable, from_rpc_error
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc

# Seconds that a library client goes on trying, and that nobody should ever need.
PATIENCE_S = 240.0
# Of a reader; cut short when the run ends.
LONGEST_SILENCE_S = 60.0


@dataclass
class Tally:
    """The fate of every request."""

    # By what it was: "whole", "resumed", "refused", "broken off", "cancelled", "late".
    counts: Counter[str] = field(default_factory=Counter)
    # Streams that ended with an error that no fault explains, or with another answer. Must stay empty.
    lost: list[str] = field(default_factory=list)


class Clients:
    """`num_lanes` clients, each with one request after the other until `closing` is set."""

    def __init__(self, stack: Stack, specs: list[Spec], wanted: list[Answers], seed: int) -> None:
        self._specs, self._wanted, self._seed = specs, wanted, seed
        self._target, self._credentials = stack.target, stack.callers
        self.tally = Tally()
        self.closing = asyncio.Event()
        # Managers killed so far: what was under way may break off for callers without our library. And managers stopped
        # in order: what was under way must end, what comes is refused.
        self._killed = self._stopped = 0
        # There may be no manager now.
        self._killing = self._stopping = False
        self._ways: list[tuple[float, Callable[[int, random.Random], Coroutine[Any, Any, None]]]] = [
            (0.45, self._library),
            (0.25, self._plain),
            (0.1, self._slow),
            (0.1, self._cancelling),
            (0.1, self._late),
        ]

    async def run(self, num_lanes: int) -> None:
        """Returns when every lane has ended its last request."""
        self._channel = aio_channel(self._target, self._credentials, channel_options(self._target))
        stub: object = pb_grpc.InferenceServiceStub(self._channel)
        self._stub = cast("pb_grpc.InferenceServiceAsyncStub", stub)
        client = self._client = AsyncPageKVClient(
            self._target, resume_timeout=PATIENCE_S, credentials=self._credentials
        )
        async with client, self._channel, asyncio.TaskGroup() as lanes:
            for number in range(num_lanes):
                lanes.create_task(self._lane(random.Random(f"{self._seed} {number}")))

    async def _lane(self, rng: random.Random) -> None:
        weights = [weight for weight, _ in self._ways]
        while not self.closing.is_set():
            index = rng.randrange(len(self._specs))
            ((_, way),) = rng.choices(self._ways, weights)
            await way(index, rng)

    def _judge(self, index: int, got: Answers, what: str, *, whole: bool = True) -> None:
        """An answer that came to its end, or one that broke off for a good reason."""
        wrong = difference(self._specs[index], got, self._wanted[index], whole=whole)
        if wrong is None:
            self.tally.counts[what] += 1
        else:
            self.tally.lost.append(wrong)

    # -- ways to ask

    async def _library(self, index: int, rng: random.Random, pause_s: float = 0.0) -> None:
        """Our library: streams go on over any loss, of one sequence, of several and of beams."""
        spec, got, before = self._specs[index], Answers(), self._managers()
        stream = self._client.stream(spec.prompt, n=spec.n, **spec.options)
        try:
            async with stream:
                async for chunk in stream:
                    answer = got.setdefault(chunk.index, Answer())
                    answer.token_ids += chunk.token_ids
                    answer.text += chunk.text
                    if pause_s:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self.closing.wait(), pause_s)
                        pause_s = 0.0
            for end in stream.completions.values():
                got.setdefault(end.index, Answer()).end = (end.token_ids, end.text, end.finish_reason)
            resumed = any(end.resumes for end in stream.completions.values())
            self._judge(index, got, "resumed" if resumed else "whole")
        except PageKVError as error:
            await self._failed(index, got, error, before, resumable=True)

    async def _plain(self, index: int, rng: random.Random) -> None:
        """The stubs alone: they break off with the manager, and with nothing else."""
        got, before = Answers(), self._managers()
        try:
            async for message in self._stub.Generate(self._specs[index].message()):
                take(got, message)
            self._judge(index, got, "whole")
        except grpc.RpcError as error:
            await self._failed(index, got, from_rpc_error(error, self._target), before, resumable=False)

    async def _slow(self, index: int, rng: random.Random) -> None:
        """Stops reading after the first chunk, for a moment or for up to a minute."""
        longest = LONGEST_SILENCE_S if rng.random() < 0.05 else 3.0
        await self._library(index, rng, pause_s=rng.uniform(0.5, longest))

    async def _cancelling(self, index: int, rng: random.Random) -> None:
        """Goes away in the middle."""
        got, before, left = Answers(), self._managers(), rng.randint(0, 12)
        call = self._stub.Generate(self._specs[index].message())
        try:
            async for message in call:
                take(got, message)
                left -= 1
                if left <= 0:
                    break
            call.cancel()
            self._judge(index, got, "cancelled", whole=False)
        except grpc.RpcError as error:
            await self._failed(index, got, from_rpc_error(error, self._target), before, resumable=False)

    async def _late(self, index: int, rng: random.Random) -> None:
        """Gives the call a deadline that passes in the queue, in prefill or in decode."""
        got, before = Answers(), self._managers()
        try:
            async for message in self._stub.Generate(self._specs[index].message(), timeout=rng.uniform(0.001, 1.0)):
                take(got, message)
            self._judge(index, got, "whole")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._judge(index, got, "late", whole=False)
                return
            await self._failed(index, got, from_rpc_error(error, self._target), before, resumable=False)

    async def _failed(
        self, index: int, got: Answers, error: PageKVError, before: tuple[int, int], *, resumable: bool
    ) -> None:
        """An error is right when it refuses a request at once with a hint to come back, or when the manager is gone and
        the caller does not resume.
        """
        began = any(answer.token_ids for answer in got.values())
        killed = self._killing or self._killed > before[0]
        gone = killed or self._stopping or self._stopped > before[1]
        broken = isinstance(error, ConnectionLost)
        if not began and isinstance(error, (Unavailable, Overloaded)) and (gone or not broken):
            self.tally.counts["refused"] += 1
            await asyncio.sleep(0.1)
        elif broken and killed and not resumable:
            self._judge(index, got, "broken off", whole=False)
            await asyncio.sleep(0.1)
        else:
            tokens = sum(len(answer.token_ids) for answer in got.values())
            what = f"request {self._specs[index].name} after {tokens} tokens"
            self.tally.lost.append(f"{what}: {type(error).__name__}: {error}")

    def _managers(self) -> tuple[int, int]:
        """How many were killed and stopped before; not the one that is being so, whose end a call may still meet."""
        return self._killed - self._killing, self._stopped - self._stopping

    @contextmanager
    def manager_killed(self) -> Iterator[None]:
        """Around SIGKILL and the start of the next one."""
        self._killed, self._killing = self._killed + 1, True
        yield
        self._killing = False

    @contextmanager
    def manager_stopped(self) -> Iterator[None]:
        """Around SIGTERM and the start of the next one."""
        self._stopped, self._stopping = self._stopped + 1, True
        yield
        self._stopping = False


async def undisturbed(stack: Stack, specs: list[Spec]) -> list[Answers]:
    """The answer to each request when nothing happens: eight at a time, which take hardly more steps than
    one."""
    async with aio_channel(stack.target, stack.callers, channel_options(stack.target)) as channel:
        stub: object = pb_grpc.InferenceServiceStub(channel)
        inference = cast("pb_grpc.InferenceServiceAsyncStub", stub)
        slots = asyncio.Semaphore(8)

        async def answer(spec: Spec) -> Answers:
            got = Answers()
            async with slots:
                async for message in inference.Generate(spec.message()):
                    take(got, message)
            return got

        return await asyncio.gather(*map(answer, specs))
