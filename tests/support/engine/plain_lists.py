"""Segmented LRU block by block, on plain lists, to judge `EvictionOrder` by."""

from __future__ import annotations


class PlainLists:
    """`EvictionOrder` of `num_blocks` blocks; `capacity`: protected ones at most, `depth`: of one prompt."""

    def __init__(self, num_blocks: int, capacity: int, depth: int) -> None:
        self.capacity, self.depth = capacity, depth
        self.probation = list(range(num_blocks))
        self.protected: list[int] = []
        self.proven: set[int] = set()

    def append(self, blocks: list[int]) -> None:
        self.probation += [block for block in blocks if block not in self.proven]
        self.protected += [block for block in blocks if block in self.proven]
        while len(self.protected) > self.capacity:
            fallen = self.protected.pop(0)
            self.proven.remove(fallen)
            self.probation.append(fallen)

    def remove(self, blocks: list[int]) -> None:
        for block in blocks:
            (self.protected if block in self.proven else self.probation).remove(block)

    def pop(self, count: int) -> list[int]:
        taken = [(self.probation or self.protected).pop(0) for _ in range(count)]
        self.proven -= set(taken)
        return taken

    def hit(self, blocks: list[int]) -> None:
        self.proven |= set(blocks[: self.depth])

    def invalidate(self, blocks: list[int]) -> None:
        self.proven -= set(blocks)
        self.probation += [block for block in self.protected if block not in self.proven]
        self.protected = [block for block in self.protected if block in self.proven]

    def supersede(self, blocks: list[int], heirs: list[int]) -> None:
        self.proven |= {heir for block, heir in zip(blocks, heirs, strict=True) if block in self.proven}
        self.invalidate(blocks)
