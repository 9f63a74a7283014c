"""The engine loop over a link that the test scripts: what it makes of late, odd and lost answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from fake_executor import FakeExecutor, expected_output

from pagekv.common.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from pagekv.kvmanager import engine_loop
from pagekv.kvmanager.engine_config import EngineConfig
from pagekv.kvmanager.engine_loop import EngineLoop
from pagekv.kvmanager.executor_client import AttachRefused, Description, ExecutorLink, ExecutorLost
from pagekv.kvmanager.request import CacheIdentity, FinishReason, GenerateCommand, RequestStream, SamplingParams
from pagekv.kvmanager.scheduler import SchedulerLimits
from pagekv.kvmanager.step_plan import StepOutcome, StepPlan

VOCAB = 50
DESCRIPTION = Description(
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
)


class Bench:
    """What the links of one engine have in common; the test sets it up and looks at it."""

    def __init__(self) -> None:
        self.description = DESCRIPTION
        # Seconds from sending a step to its outcome, one step after the other.
        self.step_s = 0.0
        # Changes an outcome on its way to the engine.
        self.bend: Callable[[StepOutcome], StepOutcome] = lambda outcome: outcome
        # Every step is refused.
        self.broken = False
        self.attaches: list[float] = []
        self.plans: list[StepPlan] = []
        self.link: Link | None = None


class Link:
    """Stands in for ExecutorLink: a FakeExecutor that answers one step at a time."""

    def __init__(self, bench: Bench, wake: Callable[[], None]) -> None:
        self._bench, self._wake = bench, wake
        self.epoch = 0
        self._steps: deque[StepPlan] = deque()
        self._outcomes: deque[StepOutcome] = deque()
        self._error: str | None = None
        self._executor = FakeExecutor(0, 1, VOCAB)
        bench.link = self

    async def describe(self, block_size: int, token_budget: int) -> Description:
        return self._bench.description

    async def attach(self, manager_id: str, block_size: int, num_blocks: int, layout: str, take_over: bool) -> None:
        self._bench.attaches.append(asyncio.get_running_loop().time())
        self.epoch = len(self._bench.attaches)
        self._executor = FakeExecutor(num_blocks, block_size, VOCAB)

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        self._bench.plans.append(plan)
        self._steps.append(plan)
        if len(self._steps) == 1:
            self._begin()

    def _begin(self) -> None:
        asyncio.get_running_loop().call_later(self._bench.step_s, self._finish)

    def _finish(self) -> None:
        if self._error is None:
            outcome = self._executor.run(self._steps[0])
            if self._bench.broken:
                self.lose("refused")
                return
            if len(self._executor.live) > self._bench.description.max_sequences:
                self.lose("more sequences than the executor holds")
                return
            self._steps.popleft()
            self._outcomes.append(self._bench.bend(outcome))
            if self._steps:
                self._begin()
            self._wake()

    def lose(self, reason: str = "killed") -> None:
        self._error = reason
        self._wake()

    def take_outcome(self) -> StepOutcome | None:
        if self._outcomes:
            return self._outcomes.popleft()
        if self._error is not None:
            raise ExecutorLost(self._error)
        return None

    async def close(self) -> None:
        self._error = self._error or "closed"


def config(**changes: object) -> EngineConfig:
    base = EngineConfig(
        executor="nowhere",
        block_size=4,
        num_device_blocks=0,
        max_model_len=0,
        max_queue=100,
        priority_aging=256,
        pipeline_depth=2,
        step_timeout_s=5,
        take_over=False,
        limits=SchedulerLimits(max_batch_tokens=64, max_running=32, watermark=0.0, prefix_cache=True),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # tests give what the fields are


def run(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[EngineLoop, Bench], Awaitable[None]], **changes: object
) -> None:
    """Runs an engine while `body` does; it must be consistent and idle at the end."""

    async def main() -> None:
        bench = Bench()
        monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake: Link(bench, wake))
        engine = EngineLoop(config(**changes))
        task = asyncio.create_task(engine.run())
        await engine.wait_ready()
        test = asyncio.ensure_future(body(engine, bench))
        await asyncio.wait([test, task], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception()
        assert test.done(), "the test hangs"
        await test
        engine.check_integrity()
        assert engine.stats().active_blocks == 0
        await engine.stop(1)
        await task

    asyncio.run(main())


def command(name: str, prompt: list[int], max_tokens: int = 6, n: int = 1) -> GenerateCommand:
    return GenerateCommand(name, prompt, SamplingParams(max_tokens=max_tokens), n)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; a test that waits for ever is ended by `run`."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


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


def test_tokens_come_through_and_blocks_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command(f"r{i}", [i, 1, 2, 3, 4])) for i in range(5)]
        assert [await read(stream) for stream in streams] == [expect([i, 1, 2, 3, 4]) for i in range(5)]

    run(monkeypatch, body)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "bend",
    [
        lambda outcome: replace(outcome, computed_tokens=outcome.computed_tokens + 1),
        lambda outcome: replace(outcome, sampled_handles=[999], sampled_tokens=[1]),
        lambda outcome: replace(outcome, sampled_tokens=[]),
        lambda outcome: replace(outcome, step=outcome.step + 1),
    ],
)
def test_an_answer_that_does_not_fit_its_step_costs_an_epoch_and_no_token(
    monkeypatch: pytest.MonkeyPatch, depth: int, bend: Callable[[StepOutcome], StepOutcome]
) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        def once(outcome: StepOutcome) -> StepOutcome:
            if outcome.step < 3 or len(bench.attaches) > 1:
                return outcome
            return bend(outcome)

        bench.bend = once
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body, pipeline_depth=depth)


def test_an_answer_that_nobody_asked_for_costs_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        assert bench.link is not None
        bench.link._outcomes.append(StepOutcome(1, [], [], {}, 0, 0, 0))
        bench.link._wake()
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body)


def test_the_step_timeout_counts_a_steps_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sent ahead waits for the one before it, which is no fault of the executor."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.15
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 1

    run(monkeypatch, body, step_timeout_s=0.25)


def test_a_step_without_an_answer_costs_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 60
        stream = engine.submit(command("a", [1, 2, 3]))
        await until(lambda: bool(bench.plans))
        bench.step_s = 0
        assert await read(stream) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body, step_timeout_s=0.2)


def test_an_executor_that_comes_back_smaller_gets_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        streams = [engine.submit(command(f"r{i}", [i, 1, 2])) for i in range(6)]
        await until(lambda: len(bench.plans) >= 3)
        bench.description = replace(DESCRIPTION, max_sequences=2)
        assert bench.link is not None
        bench.link.lose()
        assert [await read(stream) for stream in streams] == [expect([i, 1, 2]) for i in range(6)]
        assert len(bench.attaches) == 2

    run(monkeypatch, body)


def test_another_model_ends_requests_and_keeps_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", [1, 2, 3])))
        before = engine.stats()
        bench.description = replace(DESCRIPTION, model_fingerprint="beef", eos_token_ids=tuple(range(VOCAB)))
        assert bench.link is not None
        bench.link.lose()
        await until(lambda: len(bench.attaches) >= 2)
        assert engine.stats().generated_tokens_total == before.generated_tokens_total == 6
        # Nothing of the first model is hit, and the second one's end-of-sequence ids count.
        tokens, finish = await read(engine.submit(command("b", [1, 2, 3])))
        assert (len(tokens), finish) == (1, FinishReason.STOP)

    run(monkeypatch, body)


def test_a_smaller_pool_ends_the_requests_that_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        large = engine.submit(command("large", [1, 2, 3], max_tokens=40))
        small = engine.submit(command("small", [1, 2, 3]))
        await until(lambda: len(bench.plans) >= 3)
        bench.description = replace(DESCRIPTION, device_kv_bytes=5)
        assert bench.link is not None
        bench.link.lose()
        assert await read(small) == expect([1, 2, 3])
        with pytest.raises(Unavailable, match="smaller pool"):
            await read(large)
        with pytest.raises(InvalidRequest, match=r"need 6 blocks, the pool has 5"):
            engine.submit(command("x", [1, 2, 3], max_tokens=19))
        assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)

    run(monkeypatch, body)


def test_the_queue_counts_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command("a", [1], n=3)), engine.submit(command("b", [2], n=2))]
        with pytest.raises(AlreadyExists):
            engine.submit(command("a", [1]))
        with pytest.raises(Overloaded, match="5 sequences wait, at most 6"):
            engine.submit(command("c", [3], n=2))
        streams.append(engine.submit(command("c", [3])))
        assert [await read(stream) for stream in streams] == [expect([i]) for i in (1, 2, 3)]
        assert engine.stats().rejected_requests_total == 1

    run(monkeypatch, body, max_queue=6)


def test_looking_a_prompt_up_counts_its_full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", list(range(8)))))
        assert engine.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 8
        assert engine.lookup_prefix(list(range(7)), CacheIdentity()).device_tokens == 4
        assert engine.lookup_prefix(list(range(8)), CacheIdentity(namespace="other")).device_tokens == 0
        assert engine.reset_prefix_cache() == 3
        assert engine.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 0

    run(monkeypatch, body)


def test_refused_steps_are_tried_again_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.broken = True
        stream = engine.submit(command("a", [1, 2, 3]))
        await until(lambda: len(bench.attaches) >= 5)
        pauses = [later - sooner for sooner, later in zip(bench.attaches, bench.attaches[1:], strict=False)]
        assert pauses == sorted(pauses)
        assert pauses[-1] > 4 * pauses[0]
        bench.broken = False
        assert await read(stream) == expect([1, 2, 3])

    run(monkeypatch, body)


def test_idle_time_counts_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.bend = lambda outcome: replace(outcome, idle_us=1000)
        for count in (1, 2):
            await read(engine.submit(command(f"r{count}", [count, 2, 3])))
            await asyncio.sleep(0.05)
            # Of a request's six steps all but the first; that its sequence leaves takes one more, with nothing to do.
            assert engine.stats().steps_total == 7 * count
            assert engine.stats().executor_idle_us_total == 5 * 1000 * count

    run(monkeypatch, body)


def test_only_a_requests_own_reader_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is free as soon as its request has ended, and the reader of the ended one may still be at work."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        first = engine.submit(command("same", [1, 2, 3], n=2))
        await until(lambda: engine.block_tables("same") is None)
        second = engine.submit(command("same", [3, 2, 1]))
        engine.cancel(first)
        engine.stop_sequence(first, 1)
        engine.stop_sequence(first, 0)
        assert await read(second) == expect([3, 2, 1])
        assert engine.stats().aborted_requests_total == 0
        third = engine.submit(command("same", [3, 2, 1]))
        engine.cancel(third)
        assert engine.block_tables("same") is None

    run(monkeypatch, body)


def test_the_first_executor_must_go_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake: Link(bench, wake))
    with pytest.raises(AttachRefused, match="at most 64 blocks"):
        asyncio.run(EngineLoop(config(num_device_blocks=65)).run())


def test_the_link_to_the_executor_takes_no_detour_over_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def main() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        link = ExecutorLink(f"127.0.0.1:{port}", lambda: None)
        with pytest.raises(ExecutorLost, match="UNIMPLEMENTED"):
            await link.describe(16, 16)
        await link.close()
        await server.stop(None)

    asyncio.run(main())
