"""Who looks at the page, and the timer that looks at the pool for them.

The timer runs while there are viewers. Its looks at the pool take at most a hundredth of the event loop's time: where a
look at a huge pool takes long, there are fewer of them. What each viewer is sent is made and written on top of that. It
takes a viewer from the frame it has to the latest one, so one that reads slowly skips frames, and none of them holds
anything up.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pagekv.common.errors import Overloaded
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.engine.view import EngineView
from pagekv.kvmanager.page import frame as frames
from pagekv.kvmanager.page.block_states import device_bytes, host_bytes
from pagekv.kvmanager.page.cache_changes import CacheChanges
from pagekv.kvmanager.page.event_feed import EventFeed
from pagekv.kvmanager.page.frame import PoolFrame
from pagekv.kvmanager.page.rates import PoolRates

log = Log(__name__)

MAX_VIEWERS = 16
# Seconds between two looks at the blocks, and at what is counted and listed, at least.
LOOK_S = 0.1
COUNT_S = 0.5
# Of the event loop's time, for looks alone.
MAX_SHARE = 0.01
_RETRY_DELAY_S = 10.0


class PageEngine(Engine, Protocol):
    """An engine that can be looked into."""

    def view(self) -> EngineView | None:
        """None until an executor is attached for the first time."""
        ...


class Viewer:
    """One reader; `PageHub.enter` makes them and `PageHub.leave` is to be called for each."""

    def __init__(self, hub: PageHub) -> None:
        self._hub = hub
        self._seen: PoolFrame | None = None

    async def next(self) -> str:
        """Waits until there is something new and returns the message that brings it: JSON, on one line."""
        while True:
            frame = self._hub.frame
            if frame is not None and frame is not self._seen:
                message = self._hub.message(self._seen, frame)
                self._seen = frame
                return message
            await self._hub.news()


class PageHub:
    """States: idle (nobody looks, nothing runs) ⇄ looking."""

    def __init__(self, engine: PageEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._boot = secrets.token_hex(8)
        self.happenings = EventFeed()
        self._rates = PoolRates()
        self._table = CacheChanges()
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._counted_at = float("-inf")
        # The latest one; None while nobody looks, or there was nothing to see yet.
        self.frame: PoolFrame | None = None
        # Most viewers are where the others are. Cleared with every frame.
        self._messages: dict[int, str] = {}

    def enter(self) -> Viewer:
        """One more viewer. Raises Overloaded when there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages are open, which is the most there can be", _RETRY_DELAY_S)
        viewer = Viewer(self)
        self._viewers.add(viewer)
        if self._task is None:
            self.happenings.recording = True
            self._task = asyncio.create_task(self._look_again_and_again(), name="live page")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The viewer has gone. With the last one everything stops. Idempotent."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self.happenings.recording = False
            self._rates.pause()
            self._table.pause()
            self._counted_at = float("-inf")
            self.frame = None

    async def news(self) -> None:
        """Returns when there is another frame."""
        await self._news.wait()

    def message(self, seen: PoolFrame | None, frame: PoolFrame) -> str:
        """What takes a viewer from the frame it has seen, None for none, to another, the latest."""
        number = seen.number if seen is not None else 0
        if number not in self._messages:
            self._messages[number] = json.dumps(self._content(seen, frame), separators=(",", ":"))
        return self._messages[number]

    def _content(self, seen: PoolFrame | None, frame: PoolFrame) -> dict[str, Any]:
        if seen is None or seen.epoch != frame.epoch:
            model = self._engine.model
            assert model is not None
            content = frames.snapshot(frame, model, self._boot)
            # With it a page draws its charts afresh.
            points = self._rates.since(0)
        else:
            content = frames.delta(seen, frame)
            points = self._rates.since(seen.points)
        happenings = self.happenings.since(0 if seen is None else seen.happenings)
        content |= {"points": points} if points else {}
        content |= {"events": happenings} if happenings else {}
        return content

    async def _look_again_and_again(self) -> None:
        while True:
            # Of the processor, so that a busy machine does not make looks seem long, and the page stand still.
            begun = time.thread_time()
            try:
                self.look()
            except Exception:
                # The page is not worth an engine.
                log.exception("the live page cannot look at the pool")
            took = time.thread_time() - begun
            await asyncio.sleep(max(LOOK_S, took / MAX_SHARE))

    def look(self) -> None:
        """Makes a frame of how things are, if they are not as before."""
        view = self._engine.view()
        if view is None:
            return
        old = self.frame
        now = self._clock()
        device = device_bytes(view.scheduler.pool, view.cache.pins.holders)
        host = host_bytes(view.scheduler.host)
        if old is None or old.epoch != view.epoch or now - self._counted_at >= COUNT_S:
            self._counted_at = now
            stats = self._engine.stats()
            for kind, about in self._table.look(view.epoch, view.scheduler.pool):
                self.happenings.note(kind, **about)
            self._rates.add(now, stats)
            requests, live = frames.request_rows(self._engine)
            totals = frames.totals(stats, live)
        else:
            requests, totals = old.requests, old.totals
            if (
                old.happenings == self.happenings.total
                and np.array_equal(old.device, device)
                and np.array_equal(old.host, host)
            ):
                return
        number = old.number + 1 if old is not None else 1
        self.frame = PoolFrame(
            number, view.epoch, view.steps, device, host, requests, totals, self._rates.total, self.happenings.total
        )
        self._messages = {}
        news, self._news = self._news, asyncio.Event()
        news.set()
