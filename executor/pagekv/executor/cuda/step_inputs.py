"""One step's inputs as arrays, and the live sequences that they come from, with their device indices and block tables
as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Scheduled, SequenceState
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.kernels.attention_plan import StepBatch
from pagekv.kernels.tensors import Ints

# A table entry without a block: the kernels' plan refuses a step that reads it, and no step waits for its swap.
NO_BLOCK = -1


@dataclass(slots=True)
class DeviceSequence:
    """A live sequence on the device. `blocks` is the list from which the first `num_blocks` entries of its row in the
    table array were copied.
    """

    state: SequenceState
    device_index: int
    blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    penalty_row: int | None = None


class DeviceSequences:
    """The live sequences, with device indices from 0 to max_sequences - 1. The index `spare` belongs to no sequence;
    rows of padding use it.
    """

    def __init__(self, max_sequences: int, penalties: PenaltyTable) -> None:
        self.spare = max_sequences
        self.penalties = penalties
        self._free = list(range(max_sequences - 1, -1, -1))
        self._live: dict[int, DeviceSequence] = {}
        self._tables: Ints = np.full((max_sequences, 1), NO_BLOCK, np.int32)

    def get(self, state: SequenceState) -> DeviceSequence:
        """The entry of a sequence, created at the first call. Raises RuntimeError if there are too many sequences."""
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
        """Frees the device indices and penalty rows of these sequences, if they have any."""
        for state in states:
            entry = self._live.get(state.seq_id)
            if entry is not None and entry.state is state:
                self._remove(entry)

    def tables(self, device_indices: Ints, width: int) -> Ints:
        """The block tables `[n, width]`, with NO_BLOCK after a sequence's last block."""
        self._widen(width)
        return self._tables[device_indices, :width]

    def _remove(self, entry: DeviceSequence) -> None:
        del self._live[entry.state.seq_id]
        self._free.append(entry.device_index)
        if entry.penalty_row is not None:
            self.penalties.free(entry.penalty_row)

    def _update_table(self, entry: DeviceSequence) -> None:
        """Copies the blocks that were appended to the block table. A table only grows; any other change comes as a new
        list.
        """
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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step with T rows and S sequences, R of which sample. Rows are in the order of the scheduled
    sequences.
    """

    batch: StepBatch
    # int32 [T]; UNKNOWN_TOKEN for the token that the sequence sampled last, if only the device knows it.
    input_ids: Ints
    # int32 [T]: the device index of each row's sequence.
    device_indices: Ints
    # The sequences that sample, and the row of each, int32 [R].
    sampling: list[DeviceSequence]
    sampled_rows: Ints

    @property
    def decodes_only(self) -> bool:
        """Whether every row is a generated token and samples."""
        return bool(self.batch.decodes.all()) and len(self.sampling) == len(self.batch.decodes)


def build_inputs(scheduled: Sequence[Scheduled], live: DeviceSequences, block_size: int) -> StepInputs:
    """The inputs of a step. Raises RuntimeError if a needed token is known neither to the host nor to the device."""
    entries = [live.get(item.state) for item in scheduled]
    starts = np.array([item.start for item in scheduled], np.int32)
    counts = np.array([item.count for item in scheduled], np.int32)
    prompts = np.array([item.state.num_prompt_tokens for item in scheduled], np.int32)
    own_indices = np.array([entry.device_index for entry in entries], np.int32)
    query_start = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = starts + counts
    ids: list[int] = []
    for item in scheduled:
        if item.count == 1:
            ids.append(item.state.token_ids[item.start])
        else:
            ids += item.state.token_ids[item.start : item.start + item.count]
    input_ids = np.array(ids, np.int32)
    samples = np.array([item.samples for item in scheduled], bool)
    sampled_rows = query_start[1:][samples] - 1
    # Only the last token of a sequence may be unknown to the host: the device keeps one token per sequence.
    known = input_ids != UNKNOWN_TOKEN
    known[sampled_rows] = True
    if not known.all():
        owner = np.searchsorted(query_start, known.argmin(), side="right") - 1
        raise RuntimeError(f"sequence {scheduled[owner].state.seq_id} would compute a token that is not known yet")
    return StepInputs(
        batch=StepBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=live.tables(own_indices, int(-(-context_lens.max() // block_size))),
            # Decodes are generated tokens that come one at a time. The prefill kernel computes prompts, even a chunk of
            # one token, and generated tokens that are recomputed in chunks after a preemption.
            decodes=(counts == 1) & (starts >= prompts),
        ),
        input_ids=input_ids,
        device_indices=np.repeat(own_indices, counts),
        sampling=[entry for entry, sampled in zip(entries, samples, strict=True) if sampled],
        sampled_rows=sampled_rows,
    )
