"""The state of the engine, which its loop changes and its queries and admission control read."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from pagekv.common.errors import Draining, Unavailable
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.tenants.accounts import Accounts
from pagekv.v1.operator_service_pb2 import GetStatsResponse

# Seconds after which a refused client should try again.
RETRY_DELAY_S = 1.0


def draining() -> Draining:
    """The error of calls that a manager refuses, or cannot finish, because it is shutting down."""
    return Draining("the manager is shutting down", RETRY_DELAY_S)


@dataclass(slots=True)
class EngineState:
    """Written by the engine loop alone; consistent between any two awaits of the loop."""

    config: EngineConfig
    cache: CacheAdmin
    live: LiveRequests
    # Accounts of the tenants: their limits and use.
    accounts: Accounts = field(default_factory=Accounts)
    # Steps, tokens, times and requests, cumulative since the manager started.
    totals: GetStatsResponse = field(default_factory=GetStatsResponse)
    # Both None until an executor is attached for the first time.
    scheduler: Scheduler | None = None
    model: EngineInfo | None = None
    # For callers: why no executor is attached, if the operator has to act.
    no_executor: str = ""
    # Attachments so far.
    epochs: int = 0
    attached: bool = False
    # A new id after every start of the manager, and when it started, in seconds since 1970.
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.time)
    # New requests are refused.
    draining: bool = False
    # The loop ends.
    stopping: bool = False

    def serving(self) -> Scheduler:
        """The scheduler. Raises Unavailable before the first attachment."""
        if self.scheduler is None:
            raise self.not_attached()
        return self.scheduler

    def not_attached(self) -> Unavailable:
        """The error of calls before the first attachment."""
        reason = f": {self.no_executor}" if self.no_executor else ""
        return Unavailable(f"no executor is attached yet{reason}", RETRY_DELAY_S)
