"""In what order free blocks are given away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.free_queue import FreeQueue

Blocks = NDArray[np.int32]


class EvictionOrder(Protocol):
    """Free blocks, the next to go first. Starts with every block in it."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def append(self, blocks: Blocks) -> None:
        """Blocks that became free, deepest of a chain first: the earlier one goes the sooner."""
        ...

    def remove(self, blocks: Blocks) -> None:
        """Free blocks that were hit and are held again."""
        ...

    def pop(self, count: int) -> Blocks:
        """Takes the next `count`, which there are."""
        ...

    def hit(self, blocks: Blocks) -> None:
        """Blocks, free before or held, that a prefix hit has proven useful."""
        ...

    def forget(self, blocks: Blocks) -> None:
        """Blocks whose content is void."""
        ...


class LruOrder(FreeQueue):
    """Least recently used first."""

    def hit(self, blocks: Blocks) -> None:
        """Recency is all that counts."""

    def forget(self, blocks: Blocks) -> None:
        """Nothing was remembered."""
