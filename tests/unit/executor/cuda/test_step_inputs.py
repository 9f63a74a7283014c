"""The host's inputs of a step: device indices, tables, tokens, rows that sample."""

from __future__ import annotations

import pytest
import torch

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import DeviceSequences, build_inputs
from pagekv.kernels.attention_plan import StepBatch


def live(max_sequences: int = 4) -> DeviceSequences:
    return DeviceSequences(max_sequences, PenaltyTable(8, torch.device("cpu")))


def state_of(seq_id: int, tokens: list[int], num_prompt: int, table: list[int], computed: int = 0) -> SequenceState:
    return SequenceState(seq_id, tokens, num_prompt, table, computed, Sampling())


def test_rows_of_a_mixed_step() -> None:
    chunk = state_of(1, [10, 11, 12, 13, 14], 5, [7, 3], 0)
    decode = state_of(2, [20, 21, 22, UNKNOWN_TOKEN], 2, [5], 3)
    last_of_prompt = state_of(3, [30, 31], 2, [9], 1)
    inputs = build_inputs([Scheduled(chunk, 1, 3), Scheduled(decode, 3, 1), Scheduled(last_of_prompt, 1, 1)], live(), 4)
    batch: StepBatch = inputs.batch
    assert inputs.input_ids.tolist() == [11, 12, 13, UNKNOWN_TOKEN, 31]
    assert batch.query_start.tolist() == [0, 3, 4, 5]
    assert batch.context_lens.tolist() == [4, 4, 2]
    assert batch.block_tables.shape == (3, 1)
    assert batch.block_tables[:, 0].tolist() == [7, 5, 9]
    # A prompt's token is none of the decode kernel's, however it came to be alone.
    assert batch.decodes.tolist() == [False, True, False]
    assert inputs.device_indices.tolist() == [0, 0, 0, 1, 2]
    assert [entry.state.seq_id for entry in inputs.sampling] == [2, 3]
    assert inputs.sampled_rows.tolist() == [3, 4]
    assert not inputs.decodes_only


@pytest.mark.parametrize(("start", "count"), [(1, 1), (1, 2)])
def test_a_token_that_nobody_knows_is_refused(start: int, count: int) -> None:
    state = state_of(7, [1, UNKNOWN_TOKEN, UNKNOWN_TOKEN], 1, [0], start)
    with pytest.raises(RuntimeError, match="sequence 7 would compute a token that is not known yet"):
        build_inputs([Scheduled(state, start, count)], live(), 4)
