"""A free queue whose memory grows with its length: one of many over the same block ids (DESIGN 5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.eviction_policy import Blocks, FreeQueue

Positions = NDArray[np.int64]
_LEAST = 16  # entries that a queue always has room for
_POSITIONS_EACH = 2**40  # positions of one queue, more than there can be entries


class GrowingQueue(FreeQueue):
    """Free blocks, least recently used first, in an array of entries that grows and shrinks: at most 16 bytes for each
    block in the queue. The column of positions, 8 bytes per block, serves any number of queues.
    """

    def __init__(self, position: Positions, number: int) -> None:
        """Starts empty. `position`: the column of positions of all blocks, -1 for a block in no queue; no block may be
        in two. `number`: the queue's number among the queues with this column.
        """
        self._entries = np.empty(_LEAST, np.int32)
        self._head = self._tail = self._length = 0
        self._offset = number * _POSITIONS_EACH
        self._position = position

    def append(self, blocks: Blocks) -> None:
        if self._tail + len(blocks) > len(self._entries):
            self._resize(self._length + len(blocks))
        super().append(blocks)

    def remove(self, blocks: Blocks) -> None:
        super().remove(blocks)
        if len(self._entries) > max(_LEAST, 4 * self._length):
            self._resize(self._length)

    def _resize(self, length: int) -> None:
        """Clears void entries and makes room for `length` blocks and as many further ones, so resizing is rare."""
        self._move_to(np.empty(max(_LEAST, 2 * length), np.int32))

    def _positions(self, start: int, end: int) -> Positions:
        return np.arange(self._offset + start, self._offset + end, dtype=np.int64)
