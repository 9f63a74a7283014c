"""Free blocks in the order they are given away, least recently used first.

An array of entries in order of joining; every block knows the position of its one valid entry. Removal from the middle
only voids that position: the entry is skipped at the head, and cleared with all other void entries when the
array is full. So a batch costs a few vector operations, in amortised constant time per block. 10 bytes a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_OUT = -1  # position of a block that is not in the queue
_WINDOW = 64  # entries looked at together when taking from the head, at least


class FreeQueue:
    """States of a block id: in the queue, or out of it. Arrays of block ids are int32."""

    def __init__(self, num_blocks: int, capacity: int | None = None) -> None:
        """With block ids 0 to num_blocks - 1 in order; or empty, for at most `capacity` of them."""
        most = num_blocks if capacity is None else capacity
        # Room for half as many further joins as there can be blocks, so clearings are rare enough to be cheap.
        self._entries = np.empty(most + (most + 1) // 2, np.int32)
        self._position = np.full(num_blocks, _OUT, np.int32)
        self._head = self._tail = self._length = 0
        if capacity is None:
            self.append(np.arange(num_blocks, dtype=np.int32))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Head to tail."""
        return iter(self._valid_entries().tolist())

    def append(self, blocks: NDArray[np.int32]) -> None:
        """Puts blocks that are out of the queue at the tail, in order."""
        if self._tail + len(blocks) > len(self._entries):
            self._clear_voided()
        end = self._tail + len(blocks)
        self._entries[self._tail : end] = blocks
        self._position[blocks] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self._length += len(blocks)

    def remove(self, blocks: NDArray[np.int32]) -> None:
        """Removes blocks that are in the queue, from anywhere."""
        self._position[blocks] = _OUT
        self._length -= len(blocks)

    def pop(self, count: int) -> NDArray[np.int32]:
        """Takes `count` blocks from the head, in order. Raises IndexError when the queue has fewer."""
        if count > self._length:
            raise IndexError(f"{count} blocks wanted, {self._length} are free")
        if self._length == self._tail - self._head:
            # No entry is void, as long as nothing has left from the middle.
            blocks = self._entries[self._head : self._head + count].copy()
            self._head += count
            self.remove(blocks)
            return blocks
        taken: list[NDArray[np.int32]] = []
        left = count
        while left:
            window = self._entries[self._head : min(self._head + max(left, _WINDOW), self._tail)]
            here = np.arange(self._head, self._head + len(window), dtype=np.int32)
            valid = np.flatnonzero(self._position[window] == here)
            if len(valid) >= left:
                valid = valid[:left]
                self._head += int(valid[-1]) + 1
            else:
                self._head += len(window)
            taken.append(window[valid])
            left -= len(valid)
        blocks = taken[0] if len(taken) == 1 else np.concatenate([np.empty(0, np.int32), *taken])
        self.remove(blocks)
        return blocks

    def _valid_entries(self) -> NDArray[np.int32]:
        entries = self._entries[self._head : self._tail]
        valid: NDArray[np.int32] = entries[self._position[entries] == np.arange(self._head, self._tail, dtype=np.int32)]
        return valid

    def _clear_voided(self) -> None:
        """Moves the valid entries to the front of the array."""
        valid = self._valid_entries()
        self._entries[: len(valid)] = valid
        self._position[valid] = np.arange(len(valid), dtype=np.int32)
        self._head, self._tail = 0, len(valid)
