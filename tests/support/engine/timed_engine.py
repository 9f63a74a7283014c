"""The engine loop in virtual time, over an executor whose steps take what they are made of.

Decisions take no time, so what comes out is the same on every machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.engine.engine_harness import Bench, Link, command, described, run

from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.step_plan import StepPlan
from pagekv.kvmanager.tenants.accounts import Accounts

# Microseconds of a step, of each sequence that decodes and of each token of a prompt.
BASE_US, DECODE_US, PROMPT_US = 2000, 600, 100
FLOOD = 24


class _Waits(selectors.SelectSelector):
    """Waits for nothing: what it was to wait has passed, and a microsecond for each turn of the loop at least."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += max(1e-6, timeout or 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on by what it waits."""

    def __init__(self) -> None:
        self._waits = _Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


def now_s() -> float:
    """The time of the loop that runs."""
    return asyncio.get_running_loop().time()


@dataclass
class Step:
    """A step at the executor: when it came, when it was begun, and how long it took; seconds."""

    plan: StepPlan
    came: float
    begun: float = 0.0
    took: float = 0.0


class TimedLink(Link):
    """An executor whose steps take time, and which says how long."""

    # Of all links, in order; emptied by whoever begins an engine.
    steps: list[Step] = []  # noqa: RUF012  # one engine at a time

    def __init__(self, bench: Bench, wake: Callable[[], None]) -> None:
        super().__init__(bench, wake)
        self._waiting: deque[Step] = deque()
        self._free_at = 0.0

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        step = Step(plan, now_s())
        self.steps.append(step)
        self._waiting.append(step)
        await super().send(plan, timeout_s)

    def _begin(self) -> None:
        step = self._waiting.popleft()
        plan, step.begun = step.plan, now_s()
        us = BASE_US + DECODE_US * plan.num_decodes + PROMPT_US * (plan.num_tokens - plan.num_decodes)
        idle_us = int(1e6 * (step.begun - self._free_at))
        step.took = 1e-6 * us
        self._free_at = step.begun + step.took
        self._bench.step_s = step.took
        self._bench.bend = lambda result: replace(result, execute_us=us, idle_us=idle_us)
        super()._begin()


def run_timed(
    monkeypatch: pytest.MonkeyPatch,
    body: Callable[[EngineLoop, Bench], Awaitable[None]],
    accounts: Accounts,
    observers: Sequence[Observer] = (),
) -> list[Step]:
    """Runs an engine while `body` does; the steps of its executor."""
    TimedLink.steps.clear()
    large = described(device_kv_bytes=2500, max_model_len=400, max_sequences=64)
    monkeypatch.setattr("support.engine.engine_harness.DESCRIPTION", large)
    monkeypatch.setattr(engine_loop, "StepsInFlight", lambda: StepsInFlight(now_s))
    limits = SchedulerLimits(max_batch_tokens=512, max_running=64, watermark=0.0)
    made = {"link": TimedLink, "loop_factory": VirtualTimeLoop}
    run(body, observers, accounts=accounts, limits=limits, **made)
    return TimedLink.steps[:]


def submit(engine: EngineLoop, accounts: Accounts, tenant: str, name: str, prompt: list[int], tokens: int) -> Any:
    """Queues a request of a tenant; its stream."""
    stream: RequestStream = engine.submit(replace(command(name, prompt, tokens), tenant=accounts.tenant(tenant)))
    return stream


def flood(engine: EngineLoop, accounts: Accounts, tokens: int = 60, tenant: str = "flooder") -> list[RequestStream]:
    """Many requests of one tenant at once."""
    prompts = [[at % 50, *range(1, 20), at % 7] for at in range(FLOOD)]
    return [submit(engine, accounts, tenant, f"{tenant}-{at}", each, tokens) for at, each in enumerate(prompts)]
