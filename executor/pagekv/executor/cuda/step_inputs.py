"""One step's inputs as arrays: the batch that the kernels plan, its tokens, and the rows that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Scheduled
from pagekv.executor.cuda.device_sequences import DeviceSequence, DeviceSequences
from pagekv.kernels.attention_plan import Ints, StepBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Rows are in the order of the scheduled sequences. T rows, S sequences, R of which sample."""

    batch: StepBatch
    # int32 [T]; UNKNOWN_TOKEN where only the device knows it: the token that the sequence sampled last.
    input_ids: Ints
    # int32 [T]: the device index of each row's sequence.
    device_indices: Ints
    # The sequences that sample, and int32 [R]: the row and the device index of each.
    sampling: list[DeviceSequence]
    sampled_rows: Ints
    sampled_indices: Ints

    @property
    def decodes_only(self) -> bool:
        """Every row is a generated token, and every row samples."""
        return bool(self.batch.decodes.all()) and len(self.sampling) == len(self.batch.decodes)


def build_inputs(scheduled: Sequence[Scheduled], live: DeviceSequences, block_size: int) -> StepInputs:
    """The inputs of a step. Raises RuntimeError when a token is needed that neither host nor device knows."""
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
    _check_unknown(input_ids, query_start, scheduled)
    samples = np.array([item.samples for item in scheduled], bool)
    return StepInputs(
        batch=StepBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=live.tables(own_indices, int(-(-context_lens.max() // block_size))),
            # Generated tokens that come one at a time. Prompts, however they are cut, take the prefill kernel, and so
            # does what is computed again in chunks after a recompute, though it was a decode the first time.
            decodes=(counts == 1) & (starts >= prompts),
        ),
        input_ids=input_ids,
        device_indices=np.repeat(own_indices, counts),
        sampling=[entry for entry, sampled in zip(entries, samples, strict=True) if sampled],
        sampled_rows=query_start[1:][samples] - 1,
        sampled_indices=own_indices[samples],
    )


def _check_unknown(input_ids: Ints, query_start: Ints, scheduled: Sequence[Scheduled]) -> None:
    """Only the last token of a sequence may be unknown: the device keeps one per sequence."""
    unknown = np.flatnonzero(input_ids == UNKNOWN_TOKEN)
    if not len(unknown):
        return
    owner = np.searchsorted(query_start, unknown, side="right") - 1
    for row, index in zip(unknown.tolist(), owner.tolist(), strict=True):
        item = scheduled[index]
        if row != query_start[index + 1] - 1 or not item.samples:
            raise RuntimeError(f"sequence {item.state.seq_id} would compute a token that is not known yet")
