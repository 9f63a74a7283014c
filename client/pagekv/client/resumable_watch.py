"""One reader of the changes of the prefix tables, over as many connections as needed. No I/O: the clients do that.

The server keeps the latest changes, so after a broken connection a watch continues after the last complete batch that
its caller has, without another snapshot. For this reason the caller gets batches of changes only when they are
complete. The parts of a snapshot are passed on as they come, and a connection that breaks during the snapshot ends the
watch.
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

# Bounds of `progress_interval` in seconds, as in the contract.
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
        # Number of messages given to the caller, in all and by earlier connections.
        self._given = self._before = 0
        # Parts of a batch that is not complete yet.
        self._parts: list[EventBatch] = []
        # Whether the server has sent everything that was requested.
        self.done = False

    def remaining_s(self) -> None:
        """A watch has no time limit."""

    def request(self) -> pb.WatchEventsRequest:
        self._parts, self._before = [], self._given
        return self._request

    def take(self, message: pb.WatchEventsResponse) -> Iterator[EventBatch]:
        """The batches that the caller gets now; none while a batch of changes is not complete."""
        self._outage.end()
        self._instance_id = message.instance_id or self._instance_id
        batch = flat(EventBatch, message)
        # Batches are numbered across all connections; a gap in the numbers of one connection stays a gap.
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
        """Seconds to wait before the next call. Raises the error if there is to be none. This module's logger warns
        when an outage begins.
        """
        # The server may not have noticed yet that the connection broke, and may count the old call beside the new one.
        is_full = self._outage.under_way and isinstance(error, Overloaded)
        if not (is_full or isinstance(error, Unavailable)):
            raise error
        if not self._request.start_revision or self._request.snapshot_only:
            raise error
        pause = self._outage.pause_s(error, error.retry_delay_s if isinstance(error, Overloaded) else 0.0)
        if pause is None:
            raise error
        return pause
