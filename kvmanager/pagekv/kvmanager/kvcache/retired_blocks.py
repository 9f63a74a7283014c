"""Blocks that left the prefix table in large batches, and whose digests have yet to be cleared, see `digest_map`."""

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
        # Whether each block is retired, [num_blocks].
        self.marked = np.zeros(num_blocks, np.bool_)
        self._marked_at = self.marked.data
        self._batch_of: Blocks = np.zeros(num_blocks, np.int32)
        # By batch number: the batch's note, and how many of its blocks are still retired.
        self._notes: dict[int, Note] = {}
        self._left: dict[int, int] = {}
        # Batches in the order in which they were retired, with their numbers; includes blocks that were taken since.
        self._queue: deque[tuple[int, Blocks]] = deque()
        self._last_batch = 0
        self.count = 0

    def __contains__(self, block: int) -> bool:
        return bool(self._marked_at[block])

    def add(self, blocks: Blocks, note: Note) -> None:
        """Retires blocks that are not retired. `note` will be called with their digests when these are cleared."""
        self._last_batch += 1
        self._notes[self._last_batch] = note
        self._batch_of[blocks] = self._last_batch
        self.marked[blocks] = True
        self._left[self._last_batch] = len(blocks)
        self._queue.append((self._last_batch, blocks))
        self.count += len(blocks)

    def note(self, block: int) -> Note:
        return self._notes[int(self._batch_of[block])]

    def take(self, blocks: Blocks) -> list[tuple[Note, list[int]]]:
        """Takes out the retired blocks among `blocks`; returns them grouped by note."""
        here = blocks[self.marked[blocks]]
        if not len(here):
            return []
        self.marked[here] = False
        batches = self._batch_of[here]
        found = []
        for number in dict.fromkeys(batches.tolist()):
            taken = here[batches == number].tolist()
            found.append((self._notes[number], taken))
            self._left[number] -= len(taken)
            if not self._left[number]:
                del self._notes[number], self._left[number]
        self.count -= len(here)
        if not self.count:
            self._queue.clear()
        return found

    def oldest(self, most: int) -> Blocks:
        """Up to `most` of the blocks that were retired first, at least one. The caller must take them now: they are not
        returned again. There must be retired blocks.

        Blocks that were taken since are skipped without counting; otherwise they could join the queue faster than they
        leave it.
        """
        found: list[Blocks] = []
        left = looked_at = most
        while left and self._queue:
            number, blocks = self._queue.popleft()
            window = blocks[:looked_at]
            here = np.flatnonzero(self.marked[window] & (self._batch_of[window] == number))[:left]
            end = int(here[-1]) + 1 if len(here) == left else len(window)
            if end < len(blocks):
                self._queue.appendleft((number, blocks[end:]))
            found.append(window[here])
            left -= len(here)
            looked_at *= 2
        return np.concatenate(found)
