"""The plan of a step's decodes: every visible key in exactly one item, and sizes that the kernel agrees with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.host_build import HostLauncher, address

from pagekv.kernels import shared_splits
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import StepBatch
from pagekv.kernels.decode_plan import (
    LEAST_SPLIT,
    LONGER_SPLITS_BEYOND,
    MIN_ROWS,
    MOST_MEMBERS,
    DecodeWork,
    decode_tile,
    decode_work,
    merge_counters,
    most_partials,
)
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import HEAD_SIZES, Variant, all_variants

SIZES = [Variant("bfloat16", "bfloat16", size) for size in HEAD_SIZES] + [
    Variant(dtype, kv_dtype, size)
    for dtype, kv_dtype, size in [
        ("float32", "float32", 64),
        ("float32", "float32", 80),
        ("float32", "float32", 256),
        ("float16", "float8_e4m3fn", 80),
        ("float16", "float8_e4m3fn", 256),
    ]
]


@dataclass(frozen=True)
class Pool:
    """A pool of bfloat16 as `PagedAttention` wants it; nothing is read from it."""

    array: np.ndarray[Any, Any]
    dtype: str = "torch.bfloat16"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.array.shape))

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return address(self.array)


def plan(lengths: list[int], window: int = 0) -> DecodeWork:
    """Rows are numbered in tens, sequences from a hundred."""
    count = np.arange(len(lengths), dtype=np.int32)
    return decode_work(rows=10 * count, sequences=100 + count, context_lens=np.array(lengths, np.int32), window=window)


def split_of(length: int, window: int = 0) -> int:
    """Keys of a split of a row with so many keys."""
    return LEAST_SPLIT << sum(min(length, window or length) > bound for bound in LONGER_SPLITS_BEYOND)


# Rows of several splits of every length that these have.
ROW_LENGTHS = st.one_of(
    st.integers(0, 5 * LEAST_SPLIT),
    *(st.integers(bound - 2, bound + 2 * split_of(bound)) for bound in LONGER_SPLITS_BEYOND),
)


@given(
    lengths=st.lists(ROW_LENGTHS, max_size=12),
    window=st.sampled_from([0, 1, 100, LEAST_SPLIT, LEAST_SPLIT + 1, 3000, 4096, 5000, 70_000]),
)
def test_every_visible_key_is_in_exactly_one_item(lengths: list[int], window: int) -> None:
    work = plan(lengths, window)
    assert work.num_splits == len(work.items)
    assert work.item_contexts.tolist() == [lengths[row // 10] for row in work.items[:, 0]]
    partials: list[int] = []
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for row, sequence, word, merge in work.items.tolist():
        assert sequence == 100 + row // 10
        split = word & 0xFFFFFF
        assert LEAST_SPLIT << (word >> 24) == split_of(lengths[row // 10], window)
        seen[row // 10].append(split)
        if merge < 0:
            continue
        owner, first, count, first_split = work.merges[merge].tolist()
        assert owner == row
        assert 0 <= split - first_split < count
        partials.append(first + split - first_split)
    for row, length in enumerate(lengths):
        oldest = max(length - window, 0) if window else 0
        of_row = split_of(length, window)
        expected = [*range(oldest // of_row, -(-length // of_row))] or [oldest // of_row]
        assert sorted(seen[row]) == expected, "and a row without keys has an item that writes zeros"
        assert (10 * row in work.merges[:, 0]) == (len(expected) > 1)
        assert len(expected) <= max(most_partials(length, window), 1)
    assert sorted(partials) == list(range(work.num_partials)), "each partial result has one place"
    assert work.most_partials == max((count for _, _, count, _ in work.merges.tolist()), default=0)


@given(lengths=st.lists(ROW_LENGTHS, max_size=12), window=st.sampled_from([0, 300]))
def test_items_with_the_most_keys_come_first(lengths: list[int], window: int) -> None:
    """The last items are short, so that thread blocks end together."""
    keys = []
    for row, _, word, _ in plan(lengths, window).items.tolist():
        length = lengths[row // 10]
        split, of_row = word & 0xFFFFFF, split_of(length, window)
        oldest = max(length - window, 0) if window else 0
        keys.append(min((split + 1) * of_row, length) - max(split * of_row, oldest))
    assert keys == sorted(keys, reverse=True)


def test_a_rows_items_follow_from_the_row_alone() -> None:
    """The rule behind batch invariance: cuts are at absolute positions."""
    alone = {length: plan([length]).items[:, 2:3].tolist() for length in (1, 256, 257, 2000)}
    items = plan([2000, 5, 257, 1, 256, 9000]).items
    for row, length in ((0, 2000), (2, 257), (3, 1), (4, 256)):
        assert items[items[:, 0] == 10 * row, 2:3].tolist() == alone[length]


def test_a_row_has_few_splits_however_long_it_is() -> None:
    """`most_partials` bounds all shorter contexts too, since a captured graph serves them."""
    found = [most_partials(length) for length in (256, 257, 4096, 4097, 8192, 8193, 16384, 65536, 131072)]
    assert found == [0, 2, 16, 16, 16, 17, 32, 64, 64]
    lengths = [*range(1, 20_000)]
    work = plan(lengths)
    splits = np.zeros(len(lengths), int)
    splits[work.merges[:, 0] // 10] = work.merges[:, 2]
    assert np.maximum.accumulate(splits).tolist() == [most_partials(length) for length in lengths]


def test_counters_suffice_for_every_variant() -> None:
    for variant in all_variants():
        assert decode_tile(variant).rows >= MIN_ROWS
        for heads, kv_heads in ((8, 8), (32, 8), (71, 1), (128, 2)):
            blocks = kv_heads * -(-heads // kv_heads // decode_tile(variant).rows)
            assert merge_counters(heads, kv_heads) >= blocks


@pytest.mark.kernels
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("variant", SIZES, ids=str)
def test_the_kernel_has_the_same_sizes(variant: Variant, wide: bool) -> None:
    source = "decode_fma.cuh" if variant.dtype == "float32" else "decode_mma.cuh"
    text = (
        f"constexpr bool WIDE = {str(wide).lower()};\n"
        + translation_unit(source)
        + (
            "struct Params { int* out; };\n"
            'extern "C" __global__ void probe(const Params p) {\n'
            "    const int sizes[] = {TILE, BLOCK_ROWS, THREADS, SHARED_BYTES, 1 << LEAST_SPLIT_LOG2};\n"
            "    for (int i = 0; i < 5; ++i) p.out[i] = sizes[i];\n}\n"
        )
    )
    out = np.zeros(5, np.int32)
    params: Any = np.array((address(out),), np.dtype([("out", "u8")]))
    macros = [f"-D{name}={value}" for name, value in variant.macros().items()] + ["-Wno-unused-function"]
    HostLauncher().run_text("probe", text, macros, (1, 1, 1), 32, 0, params)
    tile = decode_tile(variant, wide=wide)
    assert out.tolist() == [tile.keys, tile.rows, tile.threads, tile.shared_bytes, LEAST_SPLIT]


def test_thread_blocks_fit_every_gpu() -> None:
    """The least is 99 KiB (sm_86, sm_89, sm_120). Three fit an H200's SM (228 KiB, each costs 1 KiB more) at the usual
    head sizes, and four where keys are fp8."""
    for variant in all_variants():
        assert decode_tile(variant).shared_bytes <= 99 << 10, variant
        assert decode_tile(variant, wide=True).shared_bytes <= 99 << 10, variant
        assert decode_tile(variant, wide=True).rows <= MOST_MEMBERS
        if variant.head_size <= 128 and variant.dtype != "float32":
            blocks = 4 if variant.kv_element_bytes == 1 else 3
            assert blocks * (decode_tile(variant).shared_bytes + 1024) <= 228 << 10, variant


@settings(max_examples=60, deadline=None)
@given(data=st.data(), window=st.sampled_from([0, 300, 700]), all_wide=st.booleans(), most=st.sampled_from([1, 2, 5]))
def test_every_split_is_in_one_item_however_rows_share(
    data: st.DataObject, window: int, all_wide: bool, most: int
) -> None:
    """Members of an item have the same blocks there, and see all of the split; partial results have their places."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 255, 256, 511, 512, 800, 1300]), min_size=1, max_size=9))
    depths = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    families = data.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    tables = np.arange(len(lengths) * 24, dtype=np.int32).reshape(len(lengths), 24) + 1000
    for row, (depth, family) in enumerate(zip(depths, families, strict=True)):
        tables[row, :depth] = 100 * family + np.arange(depth)
    order = np.arange(len(lengths), dtype=np.int32)
    lens = np.array(lengths, np.int32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_splits, "MIN_SAVED", 1)
        work = decode_work(
            rows=10 * order,
            sequences=order,
            context_lens=lens,
            window=window,
            tables=tables,
            block_size=64,
            most_members=most,
            all_wide=all_wide,
        )
    plain = decode_work(rows=10 * order, sequences=order, context_lens=lens, window=window)
    found = [(row, split, merge) for row, _, split, merge in work.items.tolist()]
    assert not (all_wide and found)
    for first, sequence, split, count in work.wide_items.tolist():
        members = work.members[first : first + count].tolist()
        assert 1 <= count <= max(most, 1)
        assert sequence == members[0][1]
        blocks = slice(split * 4, split * 4 + 4)
        for row, own, merge, context in members:
            assert context == lengths[own]
            assert count == 1 or (tables[own, blocks] == tables[sequence, blocks]).all()
            assert count == 1 or (split + 1) * 256 <= lengths[own]
            assert count == 1 or not window or split * 256 >= lengths[own] - window
            found.append((row, split, merge))
    assert sorted(found) == sorted((row, split, merge) for row, _, split, merge in plain.items.tolist())
    assert work.merges.tolist() == plain.merges.tolist()
    assert work.num_splits == plain.num_splits == len(plain.items)
    assert work.keys_read <= plain.keys_read


def llama(sequences: int, shared: int, own: int, heads: int = 32) -> tuple[PagedAttention, StepBatch]:
    """The attention of a Llama 3 8B (8 KV heads of 128, bf16) and a step in which sequences share a prefix."""
    pool = np.zeros((1, 1, 2, 16, 8, 128), np.uint16)
    attention = PagedAttention(HostLauncher(), Pool(pool), Variant("bfloat16", "bfloat16", 128), num_heads=heads)
    length, prefix = shared + own, shared // 16
    tables = np.arange(sequences * (length // 16), dtype=np.int32).reshape(sequences, -1) + prefix
    tables[:, :prefix] = np.arange(prefix)
    lengths = np.full(sequences, length, np.int32)
    return attention, StepBatch(np.arange(sequences + 1, dtype=np.int32), lengths, tables, np.ones(sequences, bool))


@pytest.mark.parametrize(("heads", "least"), [(8, 4.7), (16, 4.4), (32, 4.0), (64, 3.3)])
def test_a_prefix_shared_by_64_sequences_is_read_a_few_times(heads: int, least: float) -> None:
    """2,048 tokens are shared, 512 are each sequence's own: attention reads at most a third of the keys. With 4 heads
    a KV head 16 sequences are members of one item, so the prefix is read four times and not 64 times."""
    attention, batch = llama(64, 2048, 512, heads)
    shared = attention.planner.decodes(batch).keys_read
    apart = replace(batch, block_tables=np.arange(64 * 160, dtype=np.int32).reshape(64, 160))
    alone = attention.planner.decodes(apart).keys_read
    assert alone == 64 * 2560
    assert alone / shared >= least


def test_rows_that_share_little_are_read_alone() -> None:
    """A second launch a layer would cost more than it saves."""
    attention, batch = llama(2, 256 * (shared_splits.MIN_SAVED - 1), 512)
    assert not len(attention.planner.decodes(batch).wide_items)
    attention, batch = llama(2, 256 * shared_splits.MIN_SAVED, 512)
    assert len(attention.planner.decodes(batch).wide_items) == shared_splits.MIN_SAVED
