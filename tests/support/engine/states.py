"""The state that an engine's loop shares with what looks at it, over a scheduler that a test drives."""

from __future__ import annotations

from support.engine.engine_harness import config
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.state import EngineState


def state_of(driver: Driver, cache: CacheAdmin) -> EngineState:
    """With pools and scheduler of the driver, which `cache` takes over."""
    cache.adopt(driver.pool, driver.scheduler.host, "model", Observer())
    return EngineState(config(), cache, LiveRequests(0), scheduler=driver.scheduler)
