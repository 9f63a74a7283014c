"""CUDA graphs of decode steps: the shapes they are recorded for, and which of them are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagekv.executor.cuda.graphs import MAX_GRAPH_BATCH, GraphCache, Recorded, graph_key, ladder, padded_batch
from pagekv.kernels.attention_plan import GraphKey, StepBatch, StepPlanner
from pagekv.kernels.decode_plan import decode_work
from pagekv.kernels.tensors import Ints
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
    planner = StepPlanner(count, block_size, num_heads, 2, Variant("bfloat16", "bfloat16", 64), window)
    work = planner.decodes(batch)
    key = graph_key(count, width, work.num_splits, 0 if work.all_wide else len(work.wide_items))
    assert key is not None
    assert count <= key.batch <= max(2 * count, 32 * -(-count // 32))
    # Raises where anything does not fit.
    host = planner.step(batch, graph=key, work=work)

    dealt = host.words[host.offsets["dealt"] :][:4].reshape(2, 2)
    assert not dealt[:, 0].any()

    def section(name: str, items: int) -> Ints:
        assert items <= host.counts[f"num_{name}"]
        return host.words[host.offsets[name] :][: 4 * items].reshape(-1, 4)

    # Every split of every row of the graph is computed once.
    alone, wide = section("decode_items", dealt[0, 1]), section("wide_items", dealt[1, 1])
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


@pytest.mark.parametrize(
    ("max_sequences", "num_tokens", "max_tokens"),
    [(3, 64, 300), (3, 800, 257), (40, 10**6, 9000), (1024, 10**5, 600)],
)
def test_every_decode_step_has_a_shape_of_the_ladder(max_sequences: int, num_tokens: int, max_tokens: int) -> None:
    """With contexts of any lengths that the pool holds."""
    keys = ladder(max_sequences, num_tokens, max_tokens, 16)
    assert len({*keys}) == len(keys) <= 21 * 5
    assert [key.batch for key in keys] == sorted((key.batch for key in keys), reverse=True)
    assert max(key.table_width for key in keys) * 16 >= max_tokens
    cache = GraphCache(Recorder())  # type: ignore[arg-type]  # a device that only records
    cache.record(keys, lambda key: lambda: torch.zeros(key.batch))
    rng = np.random.default_rng(1)
    for _ in range(300):
        count = int(rng.integers(1, min(max_sequences, MAX_GRAPH_BATCH) + 1))
        longest = min(max_tokens, num_tokens // count)
        lens = rng.integers(1, longest + 1, count).astype(np.int32) if longest else np.ones(count, np.int32)
        none = np.zeros(count, np.int32)
        work = decode_work(rows=none, sequences=none, context_lens=lens)
        needed = graph_key(count, -(-int(lens.max()) // 16), work.num_splits)
        assert needed is not None
        key = cache.find(needed)
        assert key is not None, needed
        assert key.batch == needed.batch
        assert key.table_width >= needed.table_width
        assert key.items >= needed.items


def test_steps_that_share_a_prefix_have_shapes_of_their_own() -> None:
    """64 sequences, 16 to an item, over 2,048 tokens; others take a graph without a second kernel."""
    keys = ladder(64, 64 * 512 + 2048, 2560, 16, most_members=16)
    assert {key.wide_items for key in keys if key.batch == 64} == {0, 64}
    cache = GraphCache(Recorder())  # type: ignore[arg-type]  # a device that only records
    cache.record(keys, lambda key: lambda: torch.zeros(key.batch))
    shared = cache.find(graph_key(64, 160, 64 * 10, 4 * 8) or keys[0])
    alone = cache.find(graph_key(64, 40, 64 * 2) or keys[0])
    assert shared is not None
    assert shared.wide_items >= 4 * 8
    assert alone is not None
    assert alone.wide_items == 0
    assert cache.find(graph_key(64, 160, 64 * 10, 4 * 100) or keys[0]) is None
    assert all(not key.wide_items for key in ladder(64, 10**6, 2560, 16))


class Recorder:
    """A device that counts recordings and waits; `error` is what recording raises after `good` ones. A recording takes
    a byte of its `memory`.
    """

    def __init__(self, error: Exception | None = None, good: int = 0, memory: int = 1000) -> None:
        self.captured = 0
        self.waited = 0
        self.error, self.good = error, good
        self.memory = memory

    def available_bytes(self) -> int:
        return self.memory

    def synchronize(self) -> None:
        self.waited += 1

    def capture(self, function: object) -> object:
        if self.error is not None and self.captured == self.good:
            raise self.error
        self.captured += 1
        self.memory -= 1
        return function


KEYS = [GraphKey(4, 16, 4), GraphKey(4, 64, 16), GraphKey(2, 16, 2)]


def recorded(recorder: Recorder, reserve: int = 0) -> GraphCache:
    cache = GraphCache(recorder)  # type: ignore[arg-type]  # a device that only records
    cache.record(KEYS, lambda key: lambda: torch.full((1,), key.items), reserve)
    return cache


def test_a_step_takes_the_smallest_graph_that_it_fits() -> None:
    cache = recorded(Recorder())
    assert (cache.num_captured, cache.num_failed, cache.num_replayed) == (3, 0, 0)
    assert cache.find(GraphKey(4, 16, 4)) == KEYS[0]
    assert cache.find(GraphKey(4, 16, 8)) == KEYS[1]
    assert cache.find(GraphKey(4, 256, 8)) is None
    assert cache.find(GraphKey(1, 16, 1)) is None
    assert cache.replay(KEYS[1]).item() == 16
    assert cache.num_replayed == 1


def test_without_memory_the_graphs_recorded_so_far_stay(caplog: pytest.LogCaptureFixture) -> None:
    """The others are told as an error, and their steps run without."""
    cache = recorded(Recorder(torch.OutOfMemoryError("CUDA out of memory"), good=1))
    assert (cache.num_captured, cache.num_failed) == (1, 2)
    assert cache.find(KEYS[0]) == KEYS[0]
    assert cache.find(KEYS[2]) is None
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "no memory to record more CUDA graphs" in caplog.text


def test_graphs_leave_the_memory_that_steps_need(caplog: pytest.LogCaptureFixture) -> None:
    """The one that took of it is given up, and so are those left."""
    cache = recorded(Recorder(memory=12), reserve=10)
    assert (cache.num_captured, cache.num_failed) == (2, 1)
    assert cache.find(KEYS[1]) == KEYS[1]
    assert cache.find(KEYS[2]) is None
    assert "steps need 10 bytes beside the graphs" in str(vars(caplog.records[-1]))


def test_a_model_that_cannot_be_recorded_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs that are dropped because a later one failed may still be running."""
    recorder = Recorder(RuntimeError("operation not permitted when stream is capturing"), good=1)
    cache = recorded(recorder)
    assert (cache.num_captured, cache.num_failed, recorder.waited) == (0, 3, 1)
    assert cache.find(KEYS[0]) is None
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "cannot be recorded" in caplog.text


@pytest.mark.parametrize(("worst", "kept"), [(Recorded.NO_MEMORY, 1), (Recorded.NEVER, 0)])
def test_ranks_have_the_graphs_that_all_of_them_have(
    worst: Recorded, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Here all are recorded; another rank fails at the second."""
    told: list[Recorded] = []

    def agree(own: Recorded, _: Exception | None) -> Recorded:
        told.append(own)
        # Before the first recording, then behind each.
        return worst if len(told) == 3 else own

    recorder = Recorder()
    cache = GraphCache(recorder, agree=agree)  # type: ignore[arg-type]  # a device that only records
    cache.record(KEYS, lambda key: lambda: torch.full((1,), key.items))
    assert told == [Recorded.YES] * 3
    assert (cache.num_captured, cache.num_failed) == (kept, 3 - kept)
    assert [cache.find(key) for key in KEYS] == [KEYS[0] if kept else None, None, None]
    assert "another rank cannot record it" in caplog.text + str([vars(record) for record in caplog.records])


def test_a_rank_tells_that_it_has_no_memory_for_a_graph() -> None:
    told: list[Recorded] = []
    failures: list[Exception | None] = []

    def agree(own: Recorded, failure: Exception | None) -> Recorded:
        told.append(own)
        failures.append(failure)
        return own

    short = torch.OutOfMemoryError("CUDA out of memory")
    recorder = Recorder(short, good=1)
    cache = GraphCache(recorder, agree=agree)  # type: ignore[arg-type]  # a device that only records
    cache.record(KEYS, lambda key: lambda: torch.full((1,), key.items))
    assert told == [Recorded.YES, Recorded.YES, Recorded.NO_MEMORY]
    assert failures == [None, None, short]
    assert (cache.num_captured, cache.num_failed) == (1, 2)


@pytest.mark.parametrize(("memory", "other"), [(9, Recorded.YES), (1000, Recorded.NO_MEMORY)])
def test_no_rank_begins_to_record_where_one_lacks_the_memory(memory: int, other: Recorded) -> None:
    """In the run before a recording it would leave the others in a collective."""
    recorder = Recorder(memory=memory)
    cache = GraphCache(recorder, agree=lambda own, _: min(own, other))  # type: ignore[arg-type]  # a device that only records
    cache.record(KEYS, lambda key: lambda: torch.full((1,), key.items), reserve=10)
    assert (recorder.captured, cache.num_captured, cache.num_failed) == (0, 0, 3)
