"""Free blocks in eviction order: an intrusive doubly linked list over block ids (CHECKLIST D2, D3).

Allocate at the head (least recently used), free at the tail, remove from anywhere, each O(1). Two int32 arrays hold
the links, 8 bytes a block, so a pool of a million blocks costs no Python objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_OUT = -1  # link value of a block that is not in the queue


class FreeQueue:
    """States of a block id: in the queue, or out of it. Starts with ids 0 to num_blocks - 1 in order."""

    def __init__(self, num_blocks: int) -> None:
        # A sentinel with id num_blocks closes the ring: its next is the head, its previous the tail.
        self._sentinel = num_blocks
        ring = range(num_blocks + 1)
        self._next = array("i", [(i + 1) % (num_blocks + 1) for i in ring])
        self._prev = array("i", [(i - 1) % (num_blocks + 1) for i in ring])
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _OUT

    def __iter__(self) -> Iterator[int]:
        """Head to tail."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def pop_head(self) -> int:
        """Takes the least recently used block. The queue must not be empty."""
        block = self._next[self._sentinel]
        if block == self._sentinel:
            raise IndexError("the free queue is empty")
        self.remove(block)
        return block

    def append(self, block: int) -> None:
        """Puts a block that is out of the queue at the tail."""
        if self._next[block] != _OUT:
            raise ValueError(f"block {block} is in the free queue already")
        tail = self._prev[self._sentinel]
        self._next[tail] = block
        self._prev[block] = tail
        self._next[block] = self._sentinel
        self._prev[self._sentinel] = block
        self._length += 1

    def remove(self, block: int) -> None:
        """Takes a block out from wherever it is."""
        before, after = self._prev[block], self._next[block]
        if after == _OUT:
            raise ValueError(f"block {block} is not in the free queue")
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _OUT
        self._length -= 1
