"""The viewers of the page, the frames that they are sent, and the task that looks at the pools for them.

A frame is everything that the page shows at one moment. A message takes a viewer from its own frame to the latest one,
so a viewer that reads slowly skips frames and holds nothing up. The task runs while there are viewers. Looks take at
most a hundredth of the event loop's time: if a look at a huge pool takes long, there are fewer looks. Making and
writing messages is not included.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagekv.common.errors import Overloaded
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics
from pagekv.kvmanager.page import block_states
from pagekv.kvmanager.page.event_feed import EventFeed
from pagekv.kvmanager.page.rates import Durations, PoolRates
from pagekv.v1 import types_pb2

log = Log(__name__)

MAX_VIEWERS = 16
# Least seconds between two looks at the blocks, and between two looks at counters and requests.
LOOK_S = 0.1
COUNT_S = 0.5
# Share of the event loop's time that looks may take.
MAX_SHARE = 0.01
_RETRY_DELAY_S = 10.0
# Most requests in a frame.
MAX_REQUESTS = 200

Row = dict[str, Any]
# Statistics in a frame, besides the charts.
_TOTALS = (
    "running_sequences", "waiting_sequences", "prompt_tokens_total", "cached_tokens_total", "prefix_hit_rate",
    "generated_tokens_total", "evicted_blocks_total", "preemptions_total", "steps_total", "requests_total",
    "published_blocks", "active_blocks", "utilization", "pins", "executor_attached", "executor_restarts_total",
    "hash_alarms_total", "swapped_out_blocks_total", "swapped_in_blocks_total",
)  # fmt: skip  # several entries a line: one each would fill a screen
# Numbers of a request in a frame.
_ROW = (
    "request_id", "priority", "num_sequences", "prompt_tokens", "cached_tokens", "computed_tokens",
    "generated_tokens", "max_total_tokens", "num_blocks", "preemptions",
)  # fmt: skip  # several entries a line: one each would fill a screen


@dataclass(frozen=True, slots=True)
class PoolFrame:
    """The page at one moment. Immutable, so readers may keep it."""

    number: int
    epoch: int
    device: block_states.Bytes
    host: block_states.Bytes
    # Numbers of the charts' last point and of the last event before this moment.
    points: int
    events: int
    # The other fields of a message, by name: step, counts of both pools, requests, totals.
    fields: dict[str, Any]


def request_rows(engine: EngineLoop) -> tuple[dict[str, Row], int]:
    """Up to MAX_REQUESTS live requests by request id, running ones first; and how many are live."""
    found = engine.snapshots.list_requests(MAX_REQUESTS)
    rows = {
        info.request_id: {name: getattr(info, name) for name in _ROW} | {"state": state_name(info.state)}
        for info in found.requests
    }
    return rows, found.total


def state_name(state: types_pb2.SequenceState.ValueType) -> str:
    """The page's name for the state of a sequence or request: "waiting", "running" or "swapped"."""
    return types_pb2.SequenceState.Name(state).removeprefix("SEQUENCE_STATE_").lower()


def snapshot(frame: PoolFrame, model: EngineInfo, boot: str) -> dict[str, Any]:
    """A message for a viewer that has no frame of this epoch. `boot` identifies the run of the manager: every manager
    counts epochs, steps, points and events from 1.
    """
    return {
        "type": "snapshot",
        "boot": boot,
        "epoch": frame.epoch,
        "model": {
            "id": model.model_id, "backend": model.backend, "block_size": model.block_size,
            "max_model_len": model.max_model_len,
        },
        "blocks": model.num_device_blocks,
        "host_blocks": model.num_host_blocks,
        # How many blocks are shown, from the first on.
        "shown": len(frame.device),
        "host_shown": len(frame.host),
        "device": block_states.whole(frame.device),
        "host": block_states.whole(frame.host),
        **frame.fields,
    }  # fmt: skip  # laid out as a table


def delta(old: PoolFrame, new: PoolFrame) -> dict[str, Any]:
    """A message that takes a viewer from one frame of an epoch to a later one; unchanged fields are left out."""
    states = {"device": block_states.change(old.device, new.device), "host": block_states.change(old.host, new.host)}
    message = {name: value for name, value in new.fields.items() if old.fields[name] != value}
    return {"type": "delta", **message, **{name: runs for name, runs in states.items() if runs}}


class Viewer:
    """One viewer, made by `PageHub.add_viewer`; `PageHub.remove_viewer` has to be called for each."""

    def __init__(self, hub: PageHub) -> None:
        self._hub = hub
        self._seen: PoolFrame | None = None

    async def next(self) -> str:
        """Waits for a new frame and returns the message that takes this viewer to it, as one line of JSON."""
        while True:
            frame = self._hub.frame
            if frame is not None and frame is not self._seen:
                message = self._hub.message(self._seen, frame)
                self._seen = frame
                return message
            await self._hub.news.wait()


class PageHub:
    """States: idle (no viewer, nothing runs) ⇄ looking."""

    def __init__(
        self, engine: EngineLoop, requests: RequestMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`requests`: the metrics with the durations of requests."""
        self._requests = requests
        self._engine = engine
        self._clock = clock
        self._boot = secrets.token_hex(8)
        self.feed = EventFeed()
        self._rates = PoolRates()
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        # Set, and then replaced, when there is a new frame.
        self.news = asyncio.Event()
        self._counted_at = float("-inf")
        # The latest frame; None without viewers, or before the first attachment.
        self.frame: PoolFrame | None = None
        # Messages that lead to the latest frame, by the number of the viewer's frame, which is the same for most
        # viewers.
        self._messages: dict[int, str] = {}

    def add_viewer(self) -> Viewer:
        """Adds a viewer; the first one starts the looks. Raises Overloaded if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages are open, the most possible; close one", _RETRY_DELAY_S)
        viewer = Viewer(self)
        self._viewers.add(viewer)
        if self._task is None:
            self.feed.recording = True
            self._task = asyncio.create_task(self._look_again_and_again(), name="live page")
        return viewer

    def remove_viewer(self, viewer: Viewer) -> None:
        """Removes a viewer; the looks end with the last one. Idempotent."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self.feed.pause()
            self._rates.pause()
            self._counted_at = float("-inf")
            self.frame = None

    def message(self, seen: PoolFrame | None, frame: PoolFrame) -> str:
        """The message that takes a viewer from its frame, None if it has none, to the latest one, `frame`."""
        number = seen.number if seen is not None else 0
        if number not in self._messages:
            self._messages[number] = json.dumps(self._content(seen, frame), separators=(",", ":"))
        return self._messages[number]

    def _content(self, seen: PoolFrame | None, frame: PoolFrame) -> dict[str, Any]:
        if seen is None or seen.epoch != frame.epoch:
            model = self._engine.model
            assert model is not None
            content = snapshot(frame, model, self._boot)
            # After a snapshot a page draws its charts again.
            points = self._rates.since(0)
        else:
            content, points = delta(seen, frame), self._rates.since(seen.points)
        news = {"points": points, "events": self.feed.since(0 if seen is None else seen.events)}
        return content | {name: items for name, items in news.items() if items}

    async def _look_again_and_again(self) -> None:
        while True:
            # CPU time, because wall time on a busy machine would make looks seem long and the page stand still.
            begun = time.thread_time()
            try:
                self.look()
            except Exception:
                # A broken page must not stop the engine.
                log.exception("the live page cannot look at the pool")
            took = time.thread_time() - begun
            await asyncio.sleep(max(LOOK_S, took / MAX_SHARE))

    def _durations(self) -> Durations:
        found = {
            "ttft_ms": self._requests.time_to_first_token,
            "inter_token_ms": self._requests.inter_token_latency,
            "queue_ms": self._requests.queue_time,
        }
        return {name: (histogram.count, histogram.total) for name, histogram in found.items()}

    def look(self) -> None:
        """Makes a frame of the present state, unless nothing has changed."""
        blocks = self._engine.snapshots.block_map()
        if blocks is None:
            return
        old = self.frame
        now = self._clock()
        device = block_states.device_bytes(blocks.ref_counts, blocks.pins, blocks.published)
        host = block_states.host_bytes(blocks.host_ref_counts, blocks.host_keyed)
        if old is None or old.epoch != blocks.epoch or now - self._counted_at >= COUNT_S:
            self._counted_at = now
            stats = self._engine.statistics.stats()
            self.feed.look(blocks)
            self._rates.add(now, stats, self._durations())
            requests, live = request_rows(self._engine)
            totals = {name: getattr(stats, name) for name in _TOTALS} | {"live_requests": live}
            totals["executor_rank_us"] = list(stats.executor_rank_us)
        else:
            requests, totals = old.fields["requests"], old.fields["totals"]
            if old.events == self.feed.total and np.array_equal(old.device, device) and np.array_equal(old.host, host):
                return
        number = old.number + 1 if old is not None else 1
        fields = {
            "step": blocks.step,
            "counts": block_states.counts(device, block_states.STATES),
            "host_counts": block_states.counts(host, block_states.HOST_STATES),
            "requests": requests,
            "totals": totals,
        }
        self.frame = PoolFrame(number, blocks.epoch, device, host, self._rates.total, self.feed.total, fields)
        self._messages = {}
        news, self.news = self.news, asyncio.Event()
        news.set()
