"""A scheduler at the engine loop's pace in virtual time, with callers that send one request after the other.

The executor is a sum: so much for a step, for each sequence that decodes and for each token of a prompt, in
microseconds. Nothing here takes real time but the decisions, so what comes out is the same on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from support.engine.scheduler_driver import Driver, finished

from pagekv.kvmanager.engine.step_pace import StepPace
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult

# Microseconds for a plan to reach the executor, and for its result to come back; and between a caller and the engine.
PLAN_US, RESULT_US, CALL_US = 1200.0, 500.0, 2500.0
BUDGET = 2048
QUIET = Tenant("quiet", 1)


@dataclass
class Seen:
    """Answers to the quiet tenant, and what everybody got."""

    first_ms: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class FloodedEngine:
    """The quiet tenant sends 512 tokens that are always the same and 32 others; each flooder keeps 8 requests going."""

    def __init__(
        self, costs_us: tuple[float, float, float], flooders: int, num_blocks: int = 2048, *, together: bool = False
    ) -> None:
        """`costs_us`: of a step, of a decode and of a token of a prompt. `together`: the flooders are one tenant."""
        self._costs = costs_us
        self._chance = random.Random(flooders)
        self._driver = Driver(
            num_blocks=num_blocks,
            block_size=16,
            max_batch_tokens=BUDGET,
            max_running=256,
            watermark=0.01,
            partial_hits=True,
            protected_share=0.8,
        )
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._in_flight = StepsInFlight(lambda: self._now * 1e-6)
        self._pace = StepPace(2, BUDGET, self._in_flight)
        self._plans: deque[tuple[StepPlan, int, int]] = deque()
        self._free_at = self._due_at = 0.0
        # By request: its tenant, when it was sent, and whether its first token has come.
        self._live: dict[LiveRequest, tuple[Tenant, float, bool]] = {}
        self._prefix = self._tokens(512)
        self._seen = Seen()
        tenants = [0 if together else at for at in range(flooders) for _ in range(8)]
        self._callers = [QUIET, *(Tenant(f"flooder{at}", 2 + at) for at in tenants)]

    def run(self, settle_s: float, seconds: float) -> Seen:
        """The answers of so many seconds, behind those in which everybody began."""
        for tenant in self._callers:
            self._after(self._chance.random() * 1000, partial(self._submit, tenant, 0.0))
        self._until(settle_s)
        self._seen = Seen()
        self._until(settle_s + seconds)
        return self._seen

    def _until(self, seconds: float) -> None:
        while self._events[0][0] < 1e6 * seconds:
            self._now, _, act = heapq.heappop(self._events)
            act()
            self._plan()

    def _after(self, us: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + us, self._num_events, act))

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(1, 90) for _ in range(count)]

    def _submit(self, tenant: Tenant, sent: float) -> None:
        quiet = tenant is QUIET
        prompt = [*self._prefix, *self._tokens(32)] if quiet else self._tokens(256)
        request = self._driver.submit(prompt, max_tokens=16 if quiet else 64, tenant=tenant, ignore_eos=True)
        self._live[request] = tenant, sent, False

    def _plan(self) -> None:
        scheduler = self._driver.scheduler
        while not (wait_s := self._pace.wait_s(scheduler)):
            plan = scheduler.schedule()
            if plan is None:
                return
            self._in_flight.add(plan)
            base, decode, prompt = self._costs
            us = base + decode * plan.num_decodes + prompt * (plan.num_tokens - plan.num_decodes)
            us *= self._chance.lognormvariate(0, 0.1)
            looked_at = self._now + PLAN_US
            idle = max(0.0, looked_at - self._free_at)
            self._free_at = max(self._free_at, looked_at) + us
            self._plans.append((plan, int(us), int(idle)))
            self._after(self._free_at + RESULT_US - self._now, self._commit)
        due = self._now + 1e6 * wait_s
        # Not again for what has been asked for.
        if wait_s < 1 and due > self._due_at + 1:
            self._due_at = due
            self._after(1e6 * wait_s + 1, lambda: None)

    def _commit(self) -> None:
        plan, us, idle = self._plans.popleft()
        sampled = plan.sampling.tolist()
        result = StepResult(0, sampled, self._tokens(len(sampled)), {}, plan.num_tokens, us, idle)
        committed = self._driver.scheduler.commit(plan, result)
        self._in_flight.pop()
        self._pace.learn(self._driver.scheduler, plan, result)
        self._seen.output_tokens += len(sampled)
        for sequence in committed.sequences:
            request = sequence.request
            tenant, sent, begun = self._live[request]
            if not begun:
                self._live[request] = tenant, sent, True
                if tenant is QUIET:
                    self._seen.first_ms.append((self._now + CALL_US - sent) / 1000)
                    self._seen.cached_tokens += sequence.cached_tokens or 0
                    self._seen.prompt_tokens += sequence.num_prompt
            if finished(request):
                del self._live[request]
                self._driver.scheduler.remove(request)
                # The answer, and the next request.
                sent = self._now + CALL_US
                self._after(2 * CALL_US, partial(self._submit, tenant, sent))
