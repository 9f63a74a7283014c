"""A replica of the manager's prefix tables, kept up to date with `watch_events`."""

from __future__ import annotations

from pagekv.client.types import BlockStored, EventBatch, TableCleared, UnknownEvent

__all__ = ["TableReplica"]


class TableReplica:
    """Blocks by hash. Whenever `apply` returns True, they are exactly those of the manager's tables at a step boundary.

    A watch that begins with `start_revision=revision` and this `instance_id` continues where the watch before ended.
    """

    def __init__(self) -> None:
        # Blocks on the device and in the host pool; a block may be in both.
        self.blocks: dict[str, BlockStored] = {}
        self.host_blocks: dict[str, BlockStored] = {}
        # Revision and instance id of the last complete batch, from which `watch_events` can continue.
        self.revision = 0
        self.instance_id = ""
        self._sequence = 0
        # Whether the snapshot is complete, and whether every batch that has begun is complete.
        self._founded = self._whole = False

    def apply(self, batch: EventBatch) -> bool:
        """Applies the next batch, or a part of a batch. True when the batch is complete, at a step boundary.

        Raises ValueError when a batch is missing, or does not fit the tables: start again with a new replica.
        """
        goes_on = batch.sequence == 1 and not batch.snapshot and batch.instance_id == self.instance_id
        if batch.sequence != self._sequence + 1 and not (goes_on and self._whole):
            raise ValueError(f"batch {batch.sequence} does not follow batch {self._sequence}")
        if not batch.snapshot and not self._founded:
            raise ValueError(f"batch {batch.sequence} comes before the end of the snapshot")
        self._sequence = batch.sequence
        for event in batch.events:
            if isinstance(event, UnknownEvent):
                raise ValueError(f"batch {batch.sequence} has an event unknown to this client: update the client")
            if isinstance(event, TableCleared):
                self.blocks.clear()
                self.host_blocks.clear()
                continue
            blocks = self.blocks if event.tier == "device" else self.host_blocks
            if isinstance(event, BlockStored):
                if event.block_hash in blocks:
                    raise ValueError(f"batch {batch.sequence} stores {event.block_hash}, which is stored already")
                blocks[event.block_hash] = event
            elif blocks.pop(event.block_hash, None) is None:
                raise ValueError(f"batch {batch.sequence} removes {event.block_hash}, which is not stored")
        self._whole = not batch.more
        if self._whole:
            self._founded = True
            self.revision, self.instance_id = batch.revision, batch.instance_id
        return self._whole
