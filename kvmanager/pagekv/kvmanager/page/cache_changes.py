"""Counts blocks that entered and left the prefix table between two looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.engine.views import BlockMap


class CacheChanges:
    """Remembers one look. A block that was evicted and filled again in between counts as evicted and as stored."""

    def __init__(self) -> None:
        self._epoch = 0
        self._published: NDArray[np.bool_] | None = None
        self._evictions = 0

    def pause(self) -> None:
        """Drops the last look: the next one counts as the first."""
        self._published = None

    def look(self, blocks: BlockMap) -> list[tuple[str, dict[str, Any]]]:
        """Kinds ("cleared", "evicted", "stored") and numbers of blocks since the look before, and the first block
        stored; nothing at the first look and at the first one of an epoch.
        """
        before, evictions_before = self._published, self._evictions
        now = blocks.published.copy()
        same_pool = blocks.epoch == self._epoch
        self._epoch, self._published, self._evictions = blocks.epoch, now, blocks.evictions
        if before is None or not same_pool:
            return []
        evicted = blocks.evictions - evictions_before
        left, had = int(np.count_nonzero(before & ~now)), int(np.count_nonzero(before))
        stored = int(np.count_nonzero(now)) - had + evicted
        changes: list[tuple[str, dict[str, Any]]] = []
        if left == had > evicted:
            changes.append(("cleared", {"blocks": had}))
            stored = int(np.count_nonzero(now & ~before))
        elif evicted:
            changes.append(("evicted", {"blocks": evicted}))
        if stored > 0:
            entered = np.flatnonzero(now & ~before)
            changes.append(("stored", {"blocks": stored, "block": int(entered[0]) if len(entered) else None}))
        return changes
