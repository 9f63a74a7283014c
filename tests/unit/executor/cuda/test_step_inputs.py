"""What the host prepares for a step: indices, tables, tokens; sizes of graphs; runs of copied blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.device_sequences import NO_BLOCK, DeviceSequences
from pagekv.executor.cuda.graphs import MAX_GRAPH_BATCH, GraphCache, GraphKey, graph_key, largest_batch
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import build_inputs
from pagekv.kernels.attention_plan import StepBatch, plan_step
from pagekv.kernels.decode_plan import num_decode_items
from pagekv.kernels.variants import Variant


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
    assert (inputs.sampled_rows.tolist(), inputs.sampled_indices.tolist()) == ([3, 4], [1, 2])
    assert not inputs.decodes_only


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


@pytest.mark.parametrize(("start", "count"), [(1, 1), (1, 2)])
def test_a_token_that_nobody_knows_is_refused(start: int, count: int) -> None:
    state = state_of(7, [1, UNKNOWN_TOKEN, UNKNOWN_TOKEN], 1, [0], start)
    with pytest.raises(RuntimeError, match="sequence 7 would compute a token that is not known yet"):
        build_inputs([Scheduled(state, start, count)], live(), 4)


@settings(max_examples=300)
@given(data=st.data(), count=st.integers(1, MAX_GRAPH_BATCH), window=st.sampled_from([0, 1, 300, 5000]))
def test_every_batch_fits_its_graph(data: st.DataObject, count: int, window: int) -> None:
    """Any number of sequences with any contexts, all of one length or each its own, with the rows that fill it up."""
    lengths = data.draw(
        st.one_of(
            st.integers(1, 20_000).map(lambda length: [length] * count),
            st.lists(st.sampled_from([1, 255, 256, 257, 512, 4096, 70_000]), min_size=count, max_size=count),
        )
    )
    block_size, context_lens = 256, np.array(lengths, np.int32)
    width = -(-max(lengths) // block_size)
    items = num_decode_items(context_lens, window)
    key = graph_key(count, width, items)
    assert key is not None
    capacity = key.capacity()
    assert count <= capacity.sequences <= max(2 * count, 32 * -(-count // 32))
    # Raises where anything does not fit.
    host = plan_step(
        StepBatch(
            np.arange(count + 1, dtype=np.int32),
            context_lens,
            np.zeros((count, width), np.int32),
            np.ones(count, np.bool_),
        ),
        num_blocks=1,
        block_size=block_size,
        num_heads=8,
        num_kv_heads=2,
        variant=Variant("bfloat16", "bfloat16", 64),
        window=window,
        capacity=capacity,
    )
    first = host.offsets["decode_items"]
    found = host.words[first : first + 4 * capacity.decode_items].reshape(-1, 4)
    # Every row of the graph is computed, and none twice unless it has several splits.
    assert set(found[found[:, 0] >= 0, 0].tolist()) == set(range(key.batch))
    assert int((found[:, 0] >= 0).sum()) == items + key.batch - count


def test_batches_beyond_the_largest_graph_have_none() -> None:
    assert graph_key(513, 4, 513) is None
    assert len({graph_key(count, 1, count) for count in range(1, 513)}) == 6 + 15


@pytest.mark.parametrize("max_sequences", [1, 3, 33, 500, 512, 513, 1024])
def test_no_graph_has_more_rows_than_the_largest_batch(max_sequences: int) -> None:
    keys = [graph_key(count, 1, count) for count in range(1, max_sequences + 1)]
    assert largest_batch(max_sequences) == max(key.batch for key in keys if key is not None)


class Recorder:
    """A device that counts recordings and waits; `error` is what recording raises."""

    def __init__(self) -> None:
        self.captured = 0
        self.waited = 0
        self.error: Exception | None = None

    def synchronize(self) -> None:
        self.waited += 1

    def capture(self, function: object) -> object:
        if self.error is not None:
            raise self.error
        self.captured += 1
        return function


def test_the_second_step_of_a_shape_is_recorded_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.executor.cuda.graphs.MAX_GRAPHS", 3)
    recorder = Recorder()
    cache = GraphCache(recorder)  # type: ignore[arg-type]  # a device that only records
    keys = [graph_key(count, 1, count) for count in (1, 2, 4, 8)]
    for key in keys:
        assert key is not None
        for _ in range(3):
            cache.run(key, lambda: torch.zeros(1))
    assert (cache.num_captured, cache.num_replayed) == (4, 8)
    assert keys[3] is not None
    cache.run(keys[3], lambda: torch.zeros(1))
    assert cache.num_captured == 4
    assert keys[0] is not None
    for _ in range(2):
        cache.run(keys[0], lambda: torch.zeros(1))
    assert cache.num_captured == 5


def _with_one_graph() -> tuple[Recorder, GraphCache, GraphKey]:
    """A cache with a graph of two rows, and the key of one row, met once."""
    recorder = Recorder()
    cache = GraphCache(recorder)  # type: ignore[arg-type]  # a device that only records
    recorded, met = graph_key(2, 1, 2), graph_key(1, 1, 1)
    assert recorded is not None
    assert met is not None
    for key in (recorded, recorded, met):
        cache.run(key, lambda: torch.zeros(1))
    assert (recorder.captured, recorder.waited) == (1, 0)
    return recorder, cache, met


def test_without_memory_to_record_older_graphs_go_and_later_steps_record_again() -> None:
    """The step runs without a graph; older graphs are dropped once what they enqueued is done."""
    recorder, cache, key = _with_one_graph()
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    assert cache.run(key, lambda: torch.ones(1)).item() == 1
    assert (cache.enabled, recorder.waited, cache.num_captured) == (True, 1, 1)
    recorder.error = None
    for _ in range(2):
        cache.run(key, lambda: torch.zeros(1))
    assert cache.num_captured == 2


def test_what_cannot_be_recorded_waits_for_the_device_and_ends_graphs() -> None:
    """Graphs that are dropped because a later one failed may still be running."""
    recorder, cache, key = _with_one_graph()
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    assert cache.run(key, lambda: torch.ones(1)).item() == 1
    assert (cache.enabled, recorder.waited) == (False, 1)
