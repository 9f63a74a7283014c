"""CUDA graphs of decode steps: the shapes they are recorded for, and which of them are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagekv.executor.cuda.graphs import MAX_GRAPH_BATCH, GraphCache, graph_key, padded_batch
from pagekv.kernels.attention_plan import GraphKey, StepBatch, plan_decodes, plan_step
from pagekv.kernels.shared_splits import Ints
from pagekv.kernels.variants import Variant


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, MAX_GRAPH_BATCH),
    window=st.sampled_from([0, 1, 300, 5000]),
    shared=st.booleans(),
    num_heads=st.sampled_from([8, 64]),
)
def test_every_batch_fits_its_graph(data: st.DataObject, count: int, window: int, shared: bool, num_heads: int) -> None:
    """Any number of sequences with any contexts, all of one length or each its own, with the rows that fill it up,
    whether or not they share blocks, with groups of 4 and of 32 heads."""
    lengths = data.draw(
        st.one_of(
            st.integers(1, 20_000).map(lambda length: [length] * count),
            st.lists(st.sampled_from([1, 255, 256, 257, 512, 4096, 70_000]), min_size=count, max_size=count),
        )
    )
    block_size, context_lens = 256, np.array(lengths, np.int32)
    width = -(-max(lengths) // block_size)
    tables = np.zeros((count, width), np.int32) + (0 if shared else np.arange(count, dtype=np.int32)[:, None])
    batch = StepBatch(np.arange(count + 1, dtype=np.int32), context_lens, tables, np.ones(count, np.bool_))
    variant = Variant("bfloat16", "bfloat16", 64)
    work = plan_decodes(
        batch, block_size=block_size, num_heads=num_heads, num_kv_heads=2, variant=variant, window=window
    )
    key = graph_key(count, width, work.num_splits, 0 if work.all_wide else len(work.wide_items))
    assert key is not None
    assert count <= key.batch <= max(2 * count, 32 * -(-count // 32))
    # Raises where anything does not fit.
    host = plan_step(
        batch,
        num_blocks=count,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=2,
        variant=variant,
        window=window,
        graph=key,
        work=work,
    )

    def section(name: str) -> Ints:
        first, count = host.offsets[name], host.counts[f"num_{name}"]
        found = host.words[first : first + 4 * count].reshape(-1, 4)
        return found[found[:, 0] >= 0]

    # Every split of every row of the graph is computed once.
    alone, wide = section("decode_items"), section("wide_items")
    first = host.offsets["members"]
    members = host.words[first:].reshape(-1, 4)
    rows = alone[:, 0].tolist()
    rows += [int(members[at, 0]) for begin, _, _, many in wide.tolist() for at in range(begin, begin + many)]
    assert set(rows) == set(range(key.batch))
    assert len(rows) == work.num_splits + key.batch - count


def test_batches_beyond_the_largest_graph_have_none() -> None:
    assert graph_key(513, 4, 513) is None
    assert len({graph_key(count, 1, count) for count in range(1, 513)}) == 6 + 15


@pytest.mark.parametrize("max_sequences", [1, 3, 33, 500, 512, 513, 1024])
def test_no_graph_has_more_rows_than_the_largest_batch(max_sequences: int) -> None:
    keys = [graph_key(count, 1, count) for count in range(1, max_sequences + 1)]
    assert padded_batch(min(max_sequences, MAX_GRAPH_BATCH)) == max(key.batch for key in keys if key is not None)


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
