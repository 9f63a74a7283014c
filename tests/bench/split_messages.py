"""The messages of one decode step: how large they are and how long it takes to make and to read them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import manager_workloads as work

from pagekv.executor.backend.interface import Sampled
from pagekv.executor.rpc import wire as executor_wire
from pagekv.executor.session.step import ExecutedStep
from pagekv.kvmanager.engine.executor_wire import step_request, step_result
from pagekv.kvmanager.scheduling.step_plan import StepPlan
from pagekv.steps.v1 import executor_service_pb2 as pb

Item = TypeVar("Item")
Result = TypeVar("Result")
# As of a present model, so that most ids take three bytes.
VOCAB_SIZE = 128_256
# Nanoseconds since 1970, as executors number theirs.
EPOCH = 1_790_000_000_000_000_000
FIRST_STEP = 1_000_000


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of message over a run of steps: bytes, and microseconds from and to what either process works on."""

    name: str
    mean_bytes: float
    most_bytes: int
    encode_us: float
    decode_us: float


def decode_plans(running: int, steps: int, *, spread: bool) -> list[StepPlan]:
    """Plans of consecutive steps in which `running` sequences decode and nothing else happens. `spread`: each step has
    its share of those that begin a block; otherwise all do in the same step.
    """
    engine = work.scheduler(running * (24 + steps // work.BLOCK_SIZE))
    chance = random.Random(5)
    for index in range(running):
        prompt = [chance.randrange(VOCAB_SIZE) for _ in range(256 + (index % work.BLOCK_SIZE if spread else 0))]
        engine.add(work.request(index, prompt, steps + 64))
    plans: list[StepPlan] = []
    plan = engine.schedule()
    for step in range(1, steps + 3):
        assert plan is not None
        ahead = engine.schedule()
        engine.commit(plan, work.result(plan, step, 100))
        plans.append(plan)
        plan = ahead
    return plans[2:]


def reports(plans: list[StepPlan]) -> list[ExecutedStep]:
    """An executor's report of them."""
    chance = random.Random(6)
    return [
        ExecutedStep(
            epoch=EPOCH,
            step=step,
            sampled={seq_id: Sampled(chance.randrange(VOCAB_SIZE)) for seq_id in plan.sampling.tolist()},
            computed_tokens=plan.num_tokens,
            execute_us=20_000,
            idle_us=50,
        )
        for step, plan in enumerate(plans, FIRST_STEP)
    ]


def measure(running: int, steps: int) -> list[Message]:
    """Both messages of a steady step, and the request of one in which every sequence begins a block."""
    plans = decode_plans(running, steps, spread=True)
    together = [plan for plan in decode_plans(running, 2 * work.BLOCK_SIZE, spread=False) if plan.append_seq_ids]
    return [
        _requests(f"request, {running} steady decodes", plans),
        _requests("request, every one begins a block", together),
        _results(f"result, {running} steady decodes", reports(plans)),
    ]


def _requests(name: str, plans: list[StepPlan]) -> Message:
    steps = list(enumerate(plans, FIRST_STEP))
    data, encode = _timed(lambda item: step_request(item[1], EPOCH, item[0], (2,)).SerializeToString(), steps)
    _, decode = _timed(executor_wire.step, data)
    return _message(name, data, encode, decode)


def _results(name: str, results: list[ExecutedStep]) -> Message:
    data, encode = _timed(lambda report: executor_wire.step_result(report).SerializeToString(), results)
    _, decode = _timed(lambda raw: step_result(pb.StepResult.FromString(raw)), data)
    return _message(name, data, encode, decode)


def _message(name: str, data: list[bytes], encode_us: float, decode_us: float) -> Message:
    sizes = [len(raw) for raw in data]
    return Message(name, statistics.mean(sizes), max(sizes), encode_us, decode_us)


def _timed(function: Callable[[Item], Result], items: list[Item]) -> tuple[list[Result], float]:
    """The return value for each, and the median of the microseconds it takes."""
    results, seconds = [], []
    for item in items:
        begun = time.perf_counter()
        results.append(function(item))
        seconds.append(time.perf_counter() - begun)
    return results, statistics.median(seconds) * 1e6
