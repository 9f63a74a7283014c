"""The slots of the pools that were written in an epoch. Only these may count as computed tokens and be read by copies.

The pools of a new epoch are zero. A manager that reads slots which it never wrote has made a mistake, and would serve
text without meaning. So such a step is refused (R36 and R37 in executor_service.proto).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from pagekv.executor.backend.interface import BlockCopies, CopyDirection


class WrittenSlots:
    """The number of leading slots that were written in each block of the device pool and the host pool.

    Sequences write their positions in order, and start after positions that were written, so the written slots of a
    block are always its first ones. The numbers never fall, except where a copy replaces a block: the block then has
    the number of its source.
    """

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        # Counts up to 256, the largest block size.
        self._device = array("H", bytes(2 * num_device_blocks))
        self._host = array("H", bytes(2 * num_host_blocks))

    def of(self, block: int) -> int:
        return self._device[block]

    def are_full(self, blocks: Sequence[int], block_size: int) -> bool:
        """Whether every slot of these device blocks is written."""
        return not blocks or min(map(self._device.__getitem__, blocks)) == block_size

    def copied(self) -> CopiedSlots:
        """The copies of one step over these slots; none yet, until `CopiedSlots.add` adds them."""
        return CopiedSlots(self._device, self._host)

    def write(self, ends: Mapping[int, int]) -> None:
        """Notes that device blocks are written up to, but not including, the slots `ends`, by block."""
        counts = self._device
        for block, end in ends.items():
            if counts[block] < end:
                counts[block] = end


class CopiedSlots:
    """The changes of `WrittenSlots` by the copies of one step, in order. `WrittenSlots` itself changes in `apply`."""

    def __init__(self, device: array[int], host: array[int]) -> None:
        self._device, self._host = device, host
        # Changed counts by block.
        self.on_device: dict[int, int] = {}
        self._on_host: dict[int, int] = {}

    def add(self, copies: BlockCopies) -> int:
        """Adds whole-block copies; their ids are within the pools. Returns the position of the first pair whose source
        has no written slot; -1 if there is none.
        """
        counts, changed = self._device, self.on_device
        if copies.direction is CopyDirection.SWAP_IN:
            counts, changed = self._host, self._on_host
        # All pairs may be copied at once, so no pair reads a block that another one writes.
        sources = [changed.get(block, counts[block]) for block in copies.sources]
        written = self._on_host if copies.direction is CopyDirection.SWAP_OUT else self.on_device
        written.update(zip(copies.destinations, sources, strict=True))
        return sources.index(0) if 0 in sources else -1

    def apply(self) -> None:
        for counts, changed in ((self._device, self.on_device), (self._host, self._on_host)):
            for block, count in changed.items():
                counts[block] = count
