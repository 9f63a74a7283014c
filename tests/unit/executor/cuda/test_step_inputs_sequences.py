"""Live sequences on the device: indices that are reused, block tables that grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import NO_BLOCK, DeviceSequences


def live(max_sequences: int = 4) -> DeviceSequences:
    return DeviceSequences(max_sequences, PenaltyTable(8, torch.device("cpu")))


def state_of(seq_id: int, tokens: list[int], num_prompt: int, table: list[int], computed: int = 0) -> SequenceState:
    return SequenceState(seq_id, tokens, num_prompt, table, computed, Sampling())


def test_tables_follow_what_is_appended_and_other_lists() -> None:
    sequences = live()
    state = state_of(1, [1] * 40, 40, [4, 5])
    assert sequences.tables(np.array([sequences.get(state).device_index], np.int32), 2).tolist() == [[4, 5]]
    state.block_table += [9, 6, 2]
    index = np.array([sequences.get(state).device_index], np.int32)
    assert sequences.tables(index, 5).tolist() == [[4, 5, 9, 6, 2]]
    state.block_table = [8]
    sequences.get(state)
    assert sequences.tables(index, 2).tolist() == [[8, NO_BLOCK]]
    assert sequences.tables(index, 50).shape == (1, 50)


def test_device_indices_are_freed_and_an_id_may_come_again() -> None:
    sequences = live(2)
    first, second = state_of(1, [1], 1, [0]), state_of(2, [1], 1, [1])
    indices = {sequences.get(first).device_index, sequences.get(second).device_index}
    with pytest.raises(RuntimeError, match="more than 2 sequences"):
        sequences.get(state_of(3, [1], 1, [2]))
    # The same id as a sequence that left in the same step, before anybody said so.
    again = state_of(1, [2], 1, [3])
    assert {sequences.get(again).device_index, sequences.get(second).device_index} == indices
    sequences.remove([first])  # already replaced: nothing happens
    assert sequences.get(again).device_index in indices
    sequences.remove([again, second])
    assert {sequences.get(state_of(seq_id, [1], 1, [0])).device_index for seq_id in (8, 9)} == indices
    assert sequences.spare not in indices
