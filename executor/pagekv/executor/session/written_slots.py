"""The slots of the pools that were written in an epoch: what its sequences may call computed, and its copies may read.

Pools of a new epoch are zeros, but a manager that reads what it never wrote has lost its count, and would serve a text
that follows from nothing. So such a step is refused (R36 and R37 in executor_service.proto).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from pagekv.executor.backend.interface import BlockCopies, CopyDirection


class WrittenSlots:
    """How many leading slots of each block were written, of the device pool and the host pool.

    Sequences write their positions in order, and enter behind positions that were written, so no written slot follows
    one that was not. Numbers rise, except where a copy replaces a block: it then has what its source had.
    """

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        # Up to 256, the largest block.
        self._device = array("H", bytes(2 * num_device_blocks))
        self._host = array("H", bytes(2 * num_host_blocks))

    def of(self, block: int) -> int:
        return self._device[block]

    def are_full(self, blocks: Sequence[int], block_size: int) -> bool:
        """Whether every slot of these device blocks is written."""
        return not blocks or min(map(self._device.__getitem__, blocks)) == block_size

    def copied(self) -> CopiedSlots:
        """The slots as the copies of a step will leave them."""
        return CopiedSlots(self._device, self._host)

    def write(self, ends: Mapping[int, int]) -> None:
        """Device blocks are written up to these slots, by block."""
        counts = self._device
        for block, end in ends.items():
            if counts[block] < end:
                counts[block] = end


class CopiedSlots:
    """Changes of `WrittenSlots` by the copies of one step, in their order. Nothing is changed before `apply`."""

    def __init__(self, device: array[int], host: array[int]) -> None:
        self._device, self._host = device, host
        # By block.
        self.on_device: dict[int, int] = {}
        self._on_host: dict[int, int] = {}

    def add(self, copies: BlockCopies) -> int:
        """Adds whole-block copies, with ids in their pools. Returns the position of the first pair whose source has no
        written slot, -1 where every source has.
        """
        counts, changed = self._device, self.on_device
        if copies.direction is CopyDirection.SWAP_IN:
            counts, changed = self._host, self._on_host
        # All pairs may be copied at once, so none reads what another one writes.
        sources = [changed.get(block, counts[block]) for block in copies.sources]
        written = self._on_host if copies.direction is CopyDirection.SWAP_OUT else self.on_device
        written.update(zip(copies.destinations, sources, strict=True))
        return sources.index(0) if 0 in sources else -1

    def apply(self) -> None:
        for counts, changed in ((self._device, self.on_device), (self._host, self._on_host)):
            for block, count in changed.items():
                counts[block] = count
