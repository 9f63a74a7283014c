"""Waits for the end of a step of a split model, at most for the rank timeout."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial

from pagekv.executor.model.shards import Shards

# How often the waits are checked within the rank timeout.
LOOKS = 5


class RankMarks:
    """Makes marks that end this rank if the device does not reach them in time, because it waits in a collective for a
    rank that hangs. NCCL's own timeout does not cover collectives within a graph. A backend has one `RankMarks`, and
    several of its threads may wait at the same time.
    """

    def __init__(self, mark: Callable[[], Callable[[], None]], shards: Shards) -> None:
        self._mark, self._shards = mark, shards
        # The start times of the waits under way (`time.monotonic`), by thread.
        self._began: dict[int, float] = {}
        self._watching: threading.Thread | None = None

    def __call__(self) -> Callable[[], None]:
        """Marks the end of the work enqueued so far, as `CudaDevice.mark` does."""
        return partial(self._wait, self._mark())

    def _wait(self, wait: Callable[[], None]) -> None:
        """Waits for a mark. There is no timeout while ranks load."""
        limit_s, thread = self._shards.limit_s, threading.get_ident()
        if limit_s is not None and self._watching is None:
            self._watching = threading.Thread(target=self._watch, args=(limit_s,), name="marks", daemon=True)
            self._watching.start()
        self._began[thread] = time.monotonic()
        try:
            wait()
        finally:
            del self._began[thread]

    def _watch(self, limit_s: float) -> None:
        while True:
            time.sleep(limit_s / LOOKS)
            began = min(list(self._began.values()), default=math.inf)
            if time.monotonic() - began > limit_s:
                self._shards.lost(f"a rank lets this one wait in a step for {limit_s:g} s (--rank-timeout-s)")
                return
