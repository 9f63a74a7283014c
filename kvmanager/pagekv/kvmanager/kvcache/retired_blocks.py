"""Blocks that left the prefix table in large batches and have work left to be done for each, see `digest_map`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]
Note = Callable[[Sequence[bytes]], None]


class RetiredBlocks:
    """The retired blocks of a pool, each with the note of its batch. Arrays of block ids are int32, none twice."""

    def __init__(self, num_blocks: int) -> None:
        # [num_blocks].
        self.marked = np.zeros(num_blocks, np.bool_)
        self._marked_at = self.marked.data
        self._batch_of: Blocks = np.zeros(num_blocks, np.int32)
        # By number of the batch.
        self._notes: dict[int, Note] = {}
        # Blocks in the order in which they were retired, those that were taken since among them.
        self._queue: deque[Blocks] = deque()
        self._last_batch = 0
        self.count = 0

    def __contains__(self, block: int) -> bool:
        return bool(self._marked_at[block])

    def add(self, blocks: Blocks, note: Note) -> None:
        """Retires blocks that are not. `note` is called with their digests as they are cleared."""
        self._last_batch += 1
        self._notes[self._last_batch] = note
        self._batch_of[blocks] = self._last_batch
        self.marked[blocks] = True
        self._queue.append(blocks)
        self.count += len(blocks)

    def note(self, block: int) -> Note:
        """The note of a retired block."""
        return self._notes[int(self._batch_of[block])]

    def take(self, blocks: Blocks) -> list[tuple[Note, list[int]]]:
        """Takes out those of these blocks, any blocks, that are retired; returns them by note."""
        here = blocks[self.marked[blocks]]
        if not len(here):
            return []
        self.marked[here] = False
        batches = self._batch_of[here]
        found = [(self._notes[number], here[batches == number].tolist()) for number in dict.fromkeys(batches.tolist())]
        self.count -= len(here)
        if not self.count:
            self._notes.clear()
            self._queue.clear()
        return found

    def oldest(self, most: int) -> Blocks:
        """Up to so many blocks of those retired first, some of them taken since, and none returned before; there must
        be retired ones.
        """
        blocks = self._queue.popleft()
        if len(blocks) > most:
            self._queue.appendleft(blocks[most:])
        return blocks[:most]
