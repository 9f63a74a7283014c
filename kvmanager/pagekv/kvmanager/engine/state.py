"""The parts of the engine that its loop changes and that its queries and its admission control read."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepResult

# Seconds after which a refused client should try again.
RETRY_DELAY_S = 1.0


@dataclass(slots=True)
class EngineTotals:
    """Cumulative since the manager started; names, units and meanings as in GetStatsResponse."""

    steps_total: int = 0
    computed_tokens_total: int = 0
    executor_busy_us_total: int = 0
    executor_idle_us_total: int = 0
    requests_total: int = 0
    aborted_requests_total: int = 0
    rejected_requests_total: int = 0

    def count(self, result: StepResult, work_left: bool) -> None:
        """Adds a step; `work_left`: the step before it left something to do."""
        self.steps_total += 1
        self.computed_tokens_total += result.computed_tokens
        self.executor_busy_us_total += result.execute_us
        # Waiting for a step counts against the manager only where there was something to plan.
        self.executor_idle_us_total += result.idle_us if work_left else 0


@dataclass(slots=True)
class EngineState:
    """Written by the engine loop alone; consistent between any two awaits of the loop."""

    config: EngineConfig
    cache: CacheAdmin
    live: LiveRequests
    totals: EngineTotals = field(default_factory=EngineTotals)
    # Both None until an executor is attached for the first time.
    scheduler: Scheduler | None = None
    model: EngineInfo | None = None
    # Attachments so far.
    epochs: int = 0
    attached: bool = False
    # New requests are refused.
    draining: bool = False
    # The loop ends.
    stopping: bool = False

    def serving(self) -> Scheduler:
        """The scheduler. Raises Unavailable before the first attachment."""
        if self.scheduler is None:
            raise Unavailable("no executor is attached yet", RETRY_DELAY_S)
        return self.scheduler
