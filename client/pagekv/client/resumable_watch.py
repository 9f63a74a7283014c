"""One reader of the prefix tables' changes, over as many connections as it takes. No I/O: the clients drive it.

The server holds the latest changes, so a watch whose connection broke goes on behind the last batch that its caller has
whole, without another snapshot. Batches of changes are therefore given to the caller whole or not at all; only the
parts of a snapshot are passed on as they come, and a connection that breaks among them ends the watch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pagekv.client.errors import Overloaded, PageKVError, Unavailable
from pagekv.client.outage import Outage
from pagekv.client.settings import check_seconds
from pagekv.client.types import EventBatch
from pagekv.client.wire import filled, flat
from pagekv.v1 import operator_service_pb2 as pb

# Bounds of a watch's longest silence, as the contract has them.
LEAST_PROGRESS_S = 1
MOST_PROGRESS_S = 3600


class ResumableWatch:
    """One call of `watch_events`. States: streaming ⇄ interrupted (between `failed` and the next `request`) → done."""

    def __init__(
        self,
        *,
        resume_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        progress_interval: float | None = None,
        **fields: Any,
    ) -> None:
        """`progress_interval` and `fields` are WatchOptions. Raises InvalidRequest for values out of bounds."""
        self._request = filled(pb.WatchEventsRequest(token_ids=True), **fields)
        if progress_interval is not None:
            check_seconds("progress_interval", progress_interval, LEAST_PROGRESS_S, MOST_PROGRESS_S)
            self._request.progress_interval.FromNanoseconds(int(progress_interval * 1e9))
        self._outage = Outage(resume_timeout, clock, logging.getLogger(__name__))
        self._instance_id = self._request.instance_id
        # Messages given to the caller, and those of earlier connections.
        self._given = self._before = 0
        # Parts of a batch that is not whole.
        self._parts: list[EventBatch] = []
        # The server has told all that was asked for.
        self.done = False

    def remaining_s(self) -> None:
        """A watch has no time limit."""

    def request(self) -> pb.WatchEventsRequest:
        self._parts, self._before = [], self._given
        return self._request

    def take(self, message: pb.WatchEventsResponse) -> Iterator[EventBatch]:
        """The batches that the caller gets now: none while a batch of changes is not whole."""
        self._outage.end()
        self._instance_id = message.instance_id or self._instance_id
        batch = flat(EventBatch, message)
        # Numbered through all connections; a gap in one of them stays a gap.
        batch = replace(batch, sequence=self._before + batch.sequence, instance_id=self._instance_id)
        self._parts.append(batch)
        if batch.more and not batch.snapshot:
            return
        parts, self._parts = self._parts, []
        for part in parts:
            self._given = part.sequence
            if not part.more and part.revision:
                self._request.start_revision, self._request.instance_id = part.revision, self._instance_id
            yield part

    def ended(self) -> None:
        self.done = True

    def failed(self, error: PageKVError) -> float:
        """An outage that begins is a warning of this module's logger."""
        # The server may not have noticed yet that the connection broke, and count its call beside the new one.
        is_full = self._outage.under_way and isinstance(error, Overloaded)
        if not (is_full or isinstance(error, Unavailable)):
            raise error
        if not self._request.start_revision or self._request.snapshot_only:
            raise error
        pause = self._outage.pause_s(error, error.retry_delay_s if isinstance(error, Overloaded) else 0.0)
        if pause is None:
            raise error
        return pause
