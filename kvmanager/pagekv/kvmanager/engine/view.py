"""The engine's own structures, for those who look at all of them often and change none: the live page."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineView:
    """Consistent until the next await of whoever has it, and not to be kept beyond: an epoch brings other pools."""

    scheduler: Scheduler
    cache: CacheAdmin
    live: LiveRequests
    # Attachments of this manager so far.
    epoch: int
    steps: int
