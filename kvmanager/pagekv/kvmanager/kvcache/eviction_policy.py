"""The order in which free blocks are given away (DESIGN 5).

A chain stays whole from its front: as blocks are freed deepest first, and a hit on a block is a hit on all blocks
before it, no block goes before the cached ones that follow it. No clock is looked at, so equal histories evict equally.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.free_queue import FreeQueue

Blocks = NDArray[np.int32]

# `slru`: least recently used first in two segments, see EvictionOrder. `lru`: the same with nothing protected.
POLICIES = ("lru", "slru")
DEFAULT_POLICY = "slru"
DEFAULT_PROTECTED_SHARE = 0.2
# One prompt can have 1 in so many of the protected blocks.
_PROMPTS_PROTECTED = 8


class EvictionOrder:
    """Free blocks, the next to be evicted first; starts with every block in it.

    Segmented LRU (Karedla, Love and Wherry, Computer 27(3), 1994), with a bound on what one prompt can protect.

    States of a free block: on probation, or protected. A block that was hit since it was filled is proven, and is
    protected when it becomes free; all others are on probation and go first. So content that is read only once, one
    long context or a scan, passes through probation and leaves the protected blocks alone. At most `protected_share` of
    the pool is protected: beyond that the least recently used block falls back to the tail of probation and has to
    prove itself again, so prefixes that went out of use leave.

    Only the first blocks of a prompt can be proven, as many as an eighth of the protected ones: otherwise the second
    turn of one long context would push everything else out.
    """

    def __init__(self, num_blocks: int, policy: str = "lru", protected_share: float = DEFAULT_PROTECTED_SHARE) -> None:
        """`policy` is one of POLICIES; `protected_share`, 0 to 1, matters to `slru`. Raises ValueError."""
        if policy not in POLICIES:
            raise ValueError(f"eviction policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        if policy == "lru":
            protected_share = 0
        self.capacity = int(num_blocks * protected_share)
        # Blocks of one prompt, from its first, that can be protected.
        self.depth = min(self.capacity, max(1, self.capacity // _PROMPTS_PROTECTED))
        self._probation = FreeQueue(num_blocks)
        self._protected = FreeQueue(num_blocks, self.capacity)
        # Which queue a free block is in, and which one a held block will join.
        self._proven = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        """In the present eviction order."""
        return chain(self._probation, self._protected)

    def append(self, blocks: Blocks) -> None:
        """Puts blocks that became free, the deepest of a chain first, at the tail of their segment."""
        unproven, proven = self._divided(blocks)
        # Probation first: blocks before them in their chain may fall back at once, and must come after them.
        self._probation.append(unproven)
        excess = len(self._protected) + len(proven) - self.capacity
        if excess > 0:
            fallen = self._protected.pop(min(excess, len(self._protected)))
            own = excess - len(fallen)
            if own:
                fallen, proven = np.concatenate([fallen, proven[:own]]), proven[own:]
            self._proven[fallen] = False
            self._probation.append(fallen)
        self._protected.append(proven)

    def remove(self, blocks: Blocks) -> None:
        """Removes free blocks that are held again."""
        unproven, proven = self._divided(blocks)
        self._probation.remove(unproven)
        self._protected.remove(proven)

    def _divided(self, blocks: Blocks) -> tuple[Blocks, Blocks]:
        """The unproven and the proven blocks, each in order."""
        proven = self._proven[blocks]
        return blocks[~proven], blocks[proven]

    def pop(self, count: int) -> Blocks:
        """Takes `count` blocks, from probation first; the caller knows that so many are free."""
        unproven = self._probation.pop(min(count, len(self._probation)))
        if len(unproven) == count:
            return unproven
        proven = self._protected.pop(count - len(unproven))
        self._proven[proven] = False
        return np.concatenate([unproven, proven])

    def hit(self, blocks: Blocks) -> None:
        """Counts a prefix hit on all of a prompt's cached blocks from the first one on, held by now: the first `depth`
        are proven.
        """
        self._proven[blocks[: self.depth]] = True

    def invalidate(self, blocks: Blocks) -> None:
        """The content of these blocks, free or held, is void; protected ones fall back to probation."""
        proven = blocks[self._proven[blocks]]
        if not len(proven):
            return
        protected = np.fromiter(self._protected, np.int32, len(self._protected))
        self._proven[proven] = False
        fallen = protected[~self._proven[protected]]
        self._protected.remove(fallen)
        self._probation.append(fallen)
