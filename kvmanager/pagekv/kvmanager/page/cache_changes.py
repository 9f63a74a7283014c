"""What entered and left the prefix table between two looks at it: how many, and where the first of them is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_pool import BlockPool


class CacheChanges:
    """Remembers one look. A block that was evicted and filled again in between counts as both."""

    def __init__(self) -> None:
        self._epoch = 0
        self._published: NDArray[np.bool_] | None = None
        self._evictions = 0

    def pause(self) -> None:
        """The next look is the first one."""
        self._published = None

    def look(self, epoch: int, pool: BlockPool) -> list[tuple[str, dict[str, Any]]]:
        """Kinds ("cleared", "evicted", "stored") and numbers of blocks since the look before; none at the first."""
        before, evictions_before = self._published, self._evictions
        now = pool.table.published.copy()
        same_pool = before is not None and epoch == self._epoch
        self._epoch, self._published, self._evictions = epoch, now, pool.evictions
        if before is None or not same_pool:
            return []
        evicted = pool.evictions - evictions_before
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
