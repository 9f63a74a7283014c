"""The end of a step of a split model, waited for no longer than ranks may let each other wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial

from pagekv.executor.model.shards import Shards

# Looks in the time that a rank may let others wait.
LOOKS = 5


class RankMarks:
    """Makes marks that end this rank where the device does not come to them in time: it waits in a collective for a
    rank that hangs. NCCL's own limit does not know of collectives within a graph. One of a backend, whose threads may
    wait at the same time.
    """

    def __init__(self, mark: Callable[[], Callable[[], None]], shards: Shards) -> None:
        self._mark, self._shards = mark, shards
        # When the waits under way began, by thread and by `time.monotonic`.
        self._began: dict[int, float] = {}
        self._watching: threading.Thread | None = None

    def __call__(self) -> Callable[[], None]:
        """As `CudaDevice.mark`."""
        return partial(self._wait, self._mark())

    def _wait(self, wait: Callable[[], None]) -> None:
        """Without a limit while ranks load."""
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
