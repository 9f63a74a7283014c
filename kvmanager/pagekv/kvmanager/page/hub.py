"""The viewers of the page, and the timer that looks at the pools for them.

The timer runs while there are viewers. Looks take at most a hundredth of the event loop's time: where a look at a huge
pool takes long, there are fewer of them. Making and writing messages comes on top. A message takes a viewer from the
frame it has to the latest one, so a viewer that reads slowly skips frames and holds nothing up.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagekv.common.errors import Overloaded
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.page import frame as frames
from pagekv.kvmanager.page.block_states import device_bytes, host_bytes
from pagekv.kvmanager.page.event_feed import EventFeed
from pagekv.kvmanager.page.frame import PoolFrame
from pagekv.kvmanager.page.rates import PoolRates

log = Log(__name__)

MAX_VIEWERS = 16
# Seconds between two looks at the blocks, and between two looks at counters and requests, at least.
LOOK_S = 0.1
COUNT_S = 0.5
# Share of the event loop's time that looks may take.
MAX_SHARE = 0.01
_RETRY_DELAY_S = 10.0


class Viewer:
    """One reader, made by `PageHub.add_viewer`; `PageHub.remove_viewer` is to be called for each."""

    def __init__(self, hub: PageHub) -> None:
        self._hub = hub
        self._seen: PoolFrame | None = None

    async def next(self) -> str:
        """Waits until there is a new frame and returns the message that takes this viewer to it: JSON, on one line."""
        while True:
            frame = self._hub.frame
            if frame is not None and frame is not self._seen:
                message = self._hub.message(self._seen, frame)
                self._seen = frame
                return message
            await self._hub.news.wait()


class PageHub:
    """States: idle (no viewer, nothing runs) ⇄ looking."""

    def __init__(self, engine: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._boot = secrets.token_hex(8)
        self.feed = EventFeed()
        self._rates = PoolRates()
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        # Set, and replaced, with the next frame.
        self.news = asyncio.Event()
        self._counted_at = float("-inf")
        # The latest frame; None while nobody looks, or before the first attachment.
        self.frame: PoolFrame | None = None
        # Messages to the latest frame by number of the frame that a viewer has, which is the same for most.
        self._messages: dict[int, str] = {}

    def add_viewer(self) -> Viewer:
        """Adds a viewer and starts looking with the first. Raises Overloaded when there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages are open, which is the most there can be", _RETRY_DELAY_S)
        viewer = Viewer(self)
        self._viewers.add(viewer)
        if self._task is None:
            self.feed.recording = True
            self._task = asyncio.create_task(self._look_again_and_again(), name="live page")
        return viewer

    def remove_viewer(self, viewer: Viewer) -> None:
        """Removes a viewer. With the last one everything stops. Idempotent."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self.feed.pause()
            self._rates.pause()
            self._counted_at = float("-inf")
            self.frame = None

    def message(self, seen: PoolFrame | None, frame: PoolFrame) -> str:
        """The message that takes a viewer from the frame it has, None for none, to `frame`, the latest."""
        number = seen.number if seen is not None else 0
        if number not in self._messages:
            self._messages[number] = json.dumps(self._content(seen, frame), separators=(",", ":"))
        return self._messages[number]

    def _content(self, seen: PoolFrame | None, frame: PoolFrame) -> dict[str, Any]:
        if seen is None or seen.epoch != frame.epoch:
            model = self._engine.model
            assert model is not None
            content = frames.snapshot(frame, model, self._boot)
            # With a snapshot a page draws its charts afresh.
            points = self._rates.since(0)
        else:
            content, points = frames.delta(seen, frame), self._rates.since(seen.points)
        news = {"points": points, "events": self.feed.since(0 if seen is None else seen.events)}
        return content | {name: items for name, items in news.items() if items}

    async def _look_again_and_again(self) -> None:
        while True:
            # CPU time, so that a busy machine does not make looks seem long and the page stand still.
            begun = time.thread_time()
            try:
                self.look()
            except Exception:
                # A broken page must not stop the engine.
                log.exception("the live page cannot look at the pool")
            took = time.thread_time() - begun
            await asyncio.sleep(max(LOOK_S, took / MAX_SHARE))

    def look(self) -> None:
        """Makes a frame of the present state, unless nothing has changed."""
        queries = self._engine.queries
        blocks = queries.block_map()
        if blocks is None:
            return
        old = self.frame
        now = self._clock()
        device = device_bytes(blocks.ref_counts, blocks.pins, blocks.published)
        host = host_bytes(blocks.host_ref_counts, blocks.host_keyed)
        if old is None or old.epoch != blocks.epoch or now - self._counted_at >= COUNT_S:
            self._counted_at = now
            stats = queries.stats()
            self.feed.look(blocks)
            self._rates.add(now, stats)
            requests, live = frames.request_rows(self._engine)
            totals = frames.totals(stats, live)
        else:
            requests, totals = old.fields["requests"], old.fields["totals"]
            if old.events == self.feed.total and np.array_equal(old.device, device) and np.array_equal(old.host, host):
                return
        number = old.number + 1 if old is not None else 1
        fields = frames.fields(blocks.step, device, host, requests, totals)
        self.frame = PoolFrame(number, blocks.epoch, device, host, self._rates.total, self.feed.total, fields)
        self._messages = {}
        news, self.news = self.news, asyncio.Event()
        news.set()
