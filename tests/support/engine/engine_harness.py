"""An engine loop over a scripted link: a FakeExecutor that answers when and as the test wants it to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.engine.fake_executor import FakeExecutor, expected_output
from support.engine.integrity import check_engine

from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.executor_client import ExecutorLost
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.recovery import Fault
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb

VOCAB = 50
DESCRIPTION = pb.DescribeResponse(
    model_id="",
    model_fingerprint="f00d",
    vocab_size=VOCAB,
    max_model_len=200,
    bytes_per_block=1,
    device_kv_bytes=64,
    layout="any",
    backend="fake",
    eos_token_ids=(),
    max_sequences=8,
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    kv_dtype="tuples",
    contract_revision=1,
    features=[number for number in pb.ExecutorFeature.values() if number],
    max_steps_in_flight=2,
    max_logprobs=128,
    sampler="fake-1",
)


def described(**changes: Any) -> pb.DescribeResponse:
    """DESCRIPTION with other values."""
    shown = {descriptor.name: value for descriptor, value in DESCRIPTION.ListFields()}
    return pb.DescribeResponse(**shown | changes)


class Bench:
    """The state shared by the links of one engine; the test sets it up and looks at it."""

    def __init__(self) -> None:
        self.description = DESCRIPTION
        # Seconds from sending a step to its result, one step after the other.
        self.step_s = 0.0
        # Changes a result on its way to the engine.
        self.bend: Callable[[StepResult], StepResult] = lambda result: result
        # Every step is refused.
        self.broken = False
        # Shapes that the executor cannot record when it is attached.
        self.failed_graphs = 0
        # A step with a sequence that begins like one of these ends the link, which says whose fault that was.
        self.poison: dict[tuple[int, ...], Fault] = {}
        self.attaches: list[float] = []
        self.plans: list[StepPlan] = []
        self.link: Link | None = None


class Link:
    """Stands in for ExecutorLink: a FakeExecutor that answers one step at a time."""

    def __init__(self, bench: Bench, wake: Callable[[], None]) -> None:
        self._bench, self._wake = bench, wake
        self.epoch = 0
        self._steps: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._error: ExecutorLost | None = None
        self._executor = FakeExecutor(0, 1, VOCAB)
        bench.link = self

    async def describe(self, block_size: int, token_budget: int) -> pb.DescribeResponse:
        return self._bench.description

    async def attach(self, manager_id: str, model: EngineInfo, layout: str, take_over: bool) -> pb.AttachResponse:
        self._bench.attaches.append(asyncio.get_running_loop().time())
        self.epoch = len(self._bench.attaches)
        self._executor = FakeExecutor(model.num_device_blocks, model.block_size, VOCAB, model.num_host_blocks)
        return pb.AttachResponse(epoch=self.epoch, graphs=5, failed_graphs=self._bench.failed_graphs)

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        self._bench.plans.append(plan)
        self._steps.append(plan)
        if len(self._steps) == 1:
            self._begin()

    def _begin(self) -> None:
        asyncio.get_running_loop().call_later(self._bench.step_s, self._finish)

    def _finish(self) -> None:
        if self._error is None:
            result = self._executor.run(self._steps[0])
            if self._bench.broken:
                self.lose("refused")
                return
            for prompt, fault in self._bench.poison.items():
                if any(tuple(live.tokens[: len(prompt)]) == prompt for live in self._executor.live.values()):
                    self.lose("failed", fault)
                    return
            if len(self._executor.live) > self._bench.description.max_sequences:
                self.lose("more sequences than the executor holds")
                return
            self._steps.popleft()
            self._results.append(self._bench.bend(result))
            if self._steps:
                self._begin()
            self._wake()

    def lose(self, reason: str = "killed", fault: Fault = Fault.NONE) -> None:
        self._error = ExecutorLost(reason, fault)
        self._wake()

    def take_result(self) -> StepResult | None:
        if self._results:
            return self._results.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def close(self) -> None:
        self._error = self._error or ExecutorLost("closed")


def config(**changes: object) -> EngineConfig:
    base = EngineConfig(
        executor="nowhere",
        block_size=4,
        num_device_blocks=0,
        max_queue=100,
        max_unread=1000,
        step_timeout_s=600,
        limits=SchedulerLimits(max_batch_tokens=64, max_running=32, watermark=0.0, prefix_cache=True),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # tests give what the fields are


def run(
    body: Callable[[EngineLoop, Bench], Awaitable[None]],
    observers: Sequence[Observer] = (),
    **changes: object,
) -> None:
    """Runs an engine while `body` does; it must be consistent and idle at the end. Among `changes` of its configuration
    may be `accounts`, of tenants; `link`, the class of its executor; and `loop_factory`, of its event loop.
    """
    link: Any = changes.pop("link", Link)
    loop_factory: Any = changes.pop("loop_factory", None)
    accounts = changes.pop("accounts", None)

    async def main() -> None:
        bench = Bench()
        patch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: link(bench, wake))
        engine = EngineLoop(config(**changes), accounts=accounts)  # type: ignore[arg-type]  # a test's own
        for observer in observers:
            engine.observers.add(observer)
        task = asyncio.create_task(engine.run())
        await engine.wait_ready()
        test = asyncio.ensure_future(body(engine, bench))
        await asyncio.wait([test, task], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception()
        assert test.done(), "the test hangs"
        await test
        check_engine(engine.queries)
        assert engine.statistics.stats().active_blocks == 0
        await engine.stop(1)
        await task

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def command(name: str, prompt: list[int], max_tokens: int = 6, n: int = 1) -> GenerateCommand:
    return GenerateCommand(name, prompt, SamplingParams(max_tokens=max_tokens), n)


def identified(name: str, prompt: list[int], identity: CacheIdentity) -> GenerateCommand:
    """For one token, of a caller with this namespace, adapter and media."""
    return replace(command(name, prompt, 1), identity=identity)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; a test that waits for ever is ended by `run`."""
    while not condition():  # noqa: ASYNC110  # of things that set no event
        await asyncio.sleep(0.005)


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None]:
    """Tokens and end of a request's first sequence."""
    tokens: list[int] = []
    finish = None
    while deltas := await stream.take():
        for delta in deltas:
            if delta.index == 0:
                tokens += delta.token_ids
                finish = delta.finish
    return tokens, finish


def expect(prompt: list[int], max_tokens: int = 6) -> tuple[list[int], FinishReason]:
    return expected_output(prompt, max_tokens, VOCAB), FinishReason.LENGTH
