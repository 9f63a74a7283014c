"""Live sequences on the device: an index each, the block table as an array, a row of the penalty table."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.kernels.attention_plan import Ints

# Table entry without a block: the kernels' plan refuses a step that reads it.
NO_BLOCK = -1


@dataclass(slots=True)
class DeviceSequence:
    """`blocks` is the list that the first `num_blocks` entries of the table's row were taken from."""

    state: SequenceState
    device_index: int
    blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    penalty_row: int | None = None


class DeviceSequences:
    """Device indices from 0 to max_sequences - 1; `spare` belongs to no sequence: rows that fill a batch up have it."""

    def __init__(self, max_sequences: int, penalties: PenaltyTable) -> None:
        self.spare = max_sequences
        self._penalties = penalties
        self._free = list(range(max_sequences - 1, -1, -1))
        self._live: dict[int, DeviceSequence] = {}
        self._tables: Ints = np.full((max_sequences, 1), NO_BLOCK, np.int32)

    def get(self, state: SequenceState) -> DeviceSequence:
        """The entry of a sequence, made at the first call. Raises RuntimeError when there are too many."""
        entry = self._live.get(state.seq_id)
        if entry is None or entry.state is not state:
            if entry is not None:
                self._remove(entry)
            if not self._free:
                raise RuntimeError(f"more than {self.spare} sequences are live")
            entry = self._live[state.seq_id] = DeviceSequence(state, self._free.pop())
        self._update_table(entry)
        return entry

    def remove(self, states: list[SequenceState]) -> None:
        """Frees the device index and penalty row of these sequences, where they have one."""
        for state in states:
            entry = self._live.get(state.seq_id)
            if entry is not None and entry.state is state:
                self._remove(entry)

    def tables(self, device_indices: Ints, width: int) -> Ints:
        """Block tables `[n, width]`, NO_BLOCK behind a sequence's last block."""
        self._widen(width)
        return self._tables[device_indices, :width]

    def _remove(self, entry: DeviceSequence) -> None:
        del self._live[entry.state.seq_id]
        self._free.append(entry.device_index)
        if entry.penalty_row is not None:
            self._penalties.free(entry.penalty_row)

    def _update_table(self, entry: DeviceSequence) -> None:
        """Adds the blocks by which the block table grew. Tables only grow; any other change is a new list."""
        blocks = entry.state.block_table
        if blocks is not entry.blocks or len(blocks) < entry.num_blocks:
            self._tables[entry.device_index] = NO_BLOCK
            entry.blocks, entry.num_blocks = blocks, 0
        if len(blocks) > entry.num_blocks:
            self._widen(len(blocks))
            self._tables[entry.device_index, entry.num_blocks : len(blocks)] = blocks[entry.num_blocks :]
            entry.num_blocks = len(blocks)

    def _widen(self, width: int) -> None:
        rows, have = self._tables.shape
        if width > have:
            wider = np.full((rows, max(width, 2 * have)), NO_BLOCK, np.int32)
            wider[:, :have] = self._tables
            self._tables = wider
