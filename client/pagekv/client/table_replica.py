"""A copy of the manager's prefix table, kept up with `watch_events`."""

from __future__ import annotations

from pagekv.client.types import BlockRemoved, BlockStored, EventBatch, TableCleared


class TableReplica:
    """Blocks by hash. Whenever `apply` returns True they are exactly those of the manager's table at a step border."""

    def __init__(self) -> None:
        self.blocks: dict[str, BlockStored] = {}
        self._sequence = 0
        # The snapshot is in.
        self._founded = False

    def apply(self, batch: EventBatch) -> bool:
        """Takes in the next batch, or part of one; True when it ended at a border.

        Raises ValueError when a batch is missing, or says what cannot be true of a copy: start again with a new one.
        """
        if batch.sequence != self._sequence + 1:
            raise ValueError(f"batch {batch.sequence} does not follow batch {self._sequence}")
        if not batch.snapshot and not self._founded:
            raise ValueError(f"batch {batch.sequence} comes before the end of the snapshot")
        self._sequence = batch.sequence
        blocks = self.blocks
        for event in batch.events:
            if isinstance(event, BlockStored):
                if event.block_hash in blocks:
                    raise ValueError(f"batch {batch.sequence} stores {event.block_hash}, which is stored already")
                blocks[event.block_hash] = event
            elif isinstance(event, BlockRemoved):
                if blocks.pop(event.block_hash, None) is None:
                    raise ValueError(f"batch {batch.sequence} removes {event.block_hash}, which is not stored")
            else:
                assert isinstance(event, TableCleared)
                blocks.clear()
        whole = not batch.more
        self._founded = self._founded or whole
        return whole
