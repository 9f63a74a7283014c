"""The order in which free blocks are evicted (DESIGN 5).

A chain stays whole from its front: blocks are freed deepest first, and a hit on a block is a hit on all blocks before
it, so no block is evicted before the cached blocks that follow it. The order uses no clock, so equal histories evict
equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]

# `slru`: two segments, each least recently used first, see EvictionOrder. `lru`: the same with nothing protected.
POLICIES = ("lru", "slru")
DEFAULT_POLICY = "slru"
DEFAULT_PROTECTED_SHARE = 0.2
# One prompt can have at most 1 / _PROMPTS_PROTECTED of the protected blocks.
_PROMPTS_PROTECTED = 8
_OUT = -1  # position of a block that is not in the queue
_WINDOW = 64  # entries examined together when taking from the head, at least


class FreeQueue:
    """Free blocks, least recently used first. States of a block id: in the queue, or out of it. The queue is an array
    of entries in the order of joining, and a column has the position of every block's valid entry. Removal only voids
    that position: the entry is skipped later at the head, or cleared with all other void entries when the array is
    full. So a batch costs a few vector operations, in amortised constant time per block. Takes 10 bytes per block.
    """

    def __init__(self, num_blocks: int, beside: FreeQueue | None = None) -> None:
        """Starts with block ids 0 to num_blocks - 1 in order. With `beside`: starts empty, for at most `num_blocks` of
        the block ids of that queue; a block must never be in both.
        """
        # Room for half as many further entries as there can be blocks, so that void entries are cleared rarely.
        self._entries = np.empty(num_blocks + (num_blocks + 1) // 2, np.int32)
        self._head = self._tail = self._length = 0
        # The position of entry i is _offset + i. One column serves two queues, one after the other.
        self._offset = 0 if beside is None else len(beside._entries)
        self._position: NDArray[np.signedinteger[Any]] = (
            np.full(num_blocks, _OUT, np.int32) if beside is None else beside._position
        )
        if beside is None:
            self.append(np.arange(num_blocks, dtype=np.int32))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Head to tail."""
        return iter(self._valid_entries().tolist())

    def append(self, blocks: Blocks) -> None:
        """Puts blocks that are out of the queue at the tail, in order."""
        if self._tail + len(blocks) > len(self._entries):
            self._move_to(self._entries)
        end = self._tail + len(blocks)
        self._entries[self._tail : end] = blocks
        self._position[blocks] = self._positions(self._tail, end)
        self._tail = end
        self._length += len(blocks)

    def remove(self, blocks: Blocks) -> None:
        """Removes blocks that are in the queue, from anywhere."""
        self._position[blocks] = _OUT
        self._length -= len(blocks)

    def pop(self, count: int) -> Blocks:
        """Takes `count` blocks from the head, in order. Raises IndexError when the queue has fewer."""
        if count > self._length:
            raise IndexError(f"{count} blocks wanted, {self._length} are free")
        if self._length == self._tail - self._head:
            # No entry is void, because no block has left from the middle.
            blocks = self._entries[self._head : self._head + count].copy()
            self._head += count
            self.remove(blocks)
            return blocks
        taken: list[Blocks] = []
        left, looked_at = count, max(count, _WINDOW)
        while left:
            window = self._entries[self._head : min(self._head + looked_at, self._tail)]
            valid = np.flatnonzero(self._position[window] == self._positions(self._head, self._head + len(window)))
            if len(valid) >= left:
                valid = valid[:left]
                self._head += int(valid[-1]) + 1
            else:
                self._head += len(window)
            taken.append(window[valid])
            left -= len(valid)
            # A long prompt that was hit leaves tens of thousands of void entries in a row.
            looked_at *= 2
        blocks = taken[0] if len(taken) == 1 else np.concatenate([np.empty(0, np.int32), *taken])
        self.remove(blocks)
        return blocks

    def ordered(self, blocks: Blocks) -> Blocks:
        """The blocks among these that are in the queue, head to tail."""
        at = self._position[blocks] - self._offset
        found: Blocks = self._entries[np.sort(at[(at >= self._head) & (at < self._tail)])]
        return found

    def _positions(self, start: int, end: int) -> NDArray[np.signedinteger[Any]]:
        """Positions of the entries [start, end)."""
        return np.arange(self._offset + start, self._offset + end, dtype=np.int32)

    def _valid_entries(self) -> Blocks:
        entries = self._entries[self._head : self._tail]
        valid: Blocks = entries[self._position[entries] == self._positions(self._head, self._tail)]
        return valid

    def _move_to(self, entries: Blocks) -> None:
        """Moves the valid entries to the front of an array, the present one or another."""
        valid = self._valid_entries()
        entries[: len(valid)] = valid
        self._entries = entries
        self._position[valid] = self._positions(0, len(valid))
        self._head, self._tail = 0, len(valid)


def protected_depth(capacity: int) -> int:
    """How many leading blocks of one prompt can be protected, if `capacity` blocks can in all."""
    return min(capacity, max(1, capacity // _PROMPTS_PROTECTED))


class EvictionOrder:
    """Free blocks, the next to be evicted first; contains every block at the start.

    Segmented LRU (Karedla, Love and Wherry, Computer 27(3), 1994), with a bound on what one prompt can protect.

    States of a free block: on probation, or protected. A block that was hit since it was filled is proven, and is
    protected when it becomes free. All others are on probation and are evicted first. So content that is used only
    once, such as a long context or a scan, passes through probation and evicts no protected block. At most
    `protected_share` of the pool is protected. Beyond that the least recently used protected block falls back to the
    tail of probation and has to be hit again, so prefixes that are no longer used leave.

    Only the leading blocks of a prompt can be proven, as many as an eighth of the protected ones. Otherwise the second
    turn of one long context would push out everything else.
    """

    def __init__(self, num_blocks: int, policy: str = "lru", protected_share: float = DEFAULT_PROTECTED_SHARE) -> None:
        """`policy` is one of POLICIES; only `slru` uses `protected_share`, 0 to 1. Raises ValueError."""
        if policy not in POLICIES:
            raise ValueError(f"eviction policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        if policy == "lru":
            protected_share = 0
        self.capacity = int(num_blocks * protected_share)
        # How many leading blocks of one prompt can be protected.
        self.depth = protected_depth(self.capacity)
        self._probation = FreeQueue(num_blocks)
        self._protected = FreeQueue(self.capacity, self._probation)
        # Whether each block was hit since it was filled, [num_blocks]. A proven block is in the protected queue if it
        # is free, and will join it if it is held.
        self.proven = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        return chain(self._probation, self._protected)

    def append(self, blocks: Blocks) -> None:
        """Puts blocks that became free, a chain's deepest first, at the tails of their segments."""
        unproven, proven = self._divided(blocks)
        # Unproven blocks first: proven ones before them in the chain may fall back at once, and must be evicted later.
        if len(unproven):
            self._probation.append(unproven)
        excess = len(self._protected) + len(proven) - self.capacity
        if excess > 0:
            fallen = self._protected.pop(min(excess, len(self._protected)))
            own = excess - len(fallen)
            if own:
                fallen, proven = np.concatenate([fallen, proven[:own]]), proven[own:]
            self.proven[fallen] = False
            self._probation.append(fallen)
        if len(proven):
            self._protected.append(proven)

    def remove(self, blocks: Blocks) -> None:
        """Removes free blocks that are held again."""
        unproven, proven = self._divided(blocks)
        if len(unproven):
            self._probation.remove(unproven)
        if len(proven):
            self._protected.remove(proven)

    def _divided(self, blocks: Blocks) -> tuple[Blocks, Blocks]:
        """The unproven and the proven blocks, each in order."""
        proven = self.proven[blocks]
        count = np.count_nonzero(proven)
        if count == 0:
            return blocks, blocks[:0]
        if count == len(blocks):
            return blocks[:0], blocks
        return blocks[~proven], blocks[proven]

    def pop(self, count: int) -> Blocks:
        """Takes `count` blocks, from probation first. The caller makes sure that so many are free."""
        unproven = self._probation.pop(min(count, len(self._probation)))
        if len(unproven) == count:
            return unproven
        proven = self._protected.pop(count - len(unproven))
        self.proven[proven] = False
        return np.concatenate([unproven, proven])

    def hit(self, blocks: Blocks) -> None:
        """Counts a prefix hit on a prompt's cached blocks, held by now: the first `depth` are proven."""
        self.proven[blocks[: self.depth]] = True

    def invalidate(self, blocks: Blocks) -> None:
        """Notes that the content of these blocks, free or held, is void; protected ones fall back to probation."""
        proven = blocks[self.proven[blocks]]
        if len(proven):
            fallen = self._protected.ordered(proven)
            self.proven[proven] = False
            self._protected.remove(fallen)
            self._probation.append(fallen)

    def supersede(self, blocks: Sequence[int], heirs: Sequence[int]) -> None:
        """Notes that the held blocks `heirs` take over the content of `blocks`; an heir of a proven block is proven."""
        # There are one or two, most often the last block of a repeated prompt, which is never proven.
        proven = [at for at, block in enumerate(blocks) if self.proven[block]]
        if proven:
            self.proven[[heirs[at] for at in proven]] = True
            self.invalidate(np.array([blocks[at] for at in proven], np.int32))
