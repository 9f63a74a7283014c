"""The plan of a step's decodes: every visible key in exactly one item, and sizes that the kernel agrees with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.host_build import HostLauncher, address

from pagekv.kernels.decode_plan import (
    MIN_ROWS,
    SPLIT_TOKENS,
    DecodeWork,
    decode_tile,
    decode_work,
    merge_counters,
    most_partials,
    num_decode_items,
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


def plan(lengths: list[int], window: int = 0) -> DecodeWork:
    """Rows are numbered in tens, sequences from a hundred."""
    count = np.arange(len(lengths), dtype=np.int32)
    return decode_work(rows=10 * count, sequences=100 + count, context_lens=np.array(lengths, np.int32), window=window)


@given(
    lengths=st.lists(st.integers(0, 5 * SPLIT_TOKENS), max_size=12),
    window=st.sampled_from([0, 1, 100, SPLIT_TOKENS, SPLIT_TOKENS + 1, 3000]),
)
def test_every_visible_key_is_in_exactly_one_item(lengths: list[int], window: int) -> None:
    work = plan(lengths, window)
    assert num_decode_items(np.array(lengths, np.int32), window) == len(work.items)
    partials: list[int] = []
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for row, sequence, split, merge in work.items.tolist():
        assert sequence == 100 + row // 10
        seen[row // 10].append(split)
        if merge < 0:
            continue
        owner, first, count, first_split = work.merges[merge].tolist()
        assert owner == row
        assert 0 <= split - first_split < count
        partials.append(first + split - first_split)
    for row, length in enumerate(lengths):
        oldest = max(length - window, 0) if window else 0
        expected = sorted({position // SPLIT_TOKENS for position in range(oldest, length)}) or [oldest // SPLIT_TOKENS]
        assert sorted(seen[row]) == expected, "and a row without keys has an item that writes zeros"
        assert (10 * row in work.merges[:, 0]) == (len(expected) > 1)
        assert len(expected) <= max(most_partials(length), 1)
    assert sorted(partials) == list(range(work.num_partials)), "each partial result has one place"
    assert work.most_partials == max((count for _, _, count, _ in work.merges.tolist()), default=0)


@given(lengths=st.lists(st.integers(0, 5 * SPLIT_TOKENS), max_size=12), window=st.sampled_from([0, 300]))
def test_items_with_the_most_keys_come_first(lengths: list[int], window: int) -> None:
    """The last items are short, so that thread blocks end together."""
    keys = []
    for row, _, split, _ in plan(lengths, window).items.tolist():
        length = lengths[row // 10]
        oldest = max(length - window, 0) if window else 0
        keys.append(min((split + 1) * SPLIT_TOKENS, length) - max(split * SPLIT_TOKENS, oldest))
    assert keys == sorted(keys, reverse=True)


def test_a_rows_items_follow_from_the_row_alone() -> None:
    """The rule behind batch invariance: cuts are at absolute positions."""
    alone = {length: plan([length]).items[:, 2:3].tolist() for length in (1, 256, 257, 2000)}
    items = plan([2000, 5, 257, 1, 256, 9000]).items
    for row, length in ((0, 2000), (2, 257), (3, 1), (4, 256)):
        assert items[items[:, 0] == 10 * row, 2:3].tolist() == alone[length]


def test_counters_suffice_for_every_variant() -> None:
    for variant in all_variants():
        assert decode_tile(variant).rows >= MIN_ROWS
        for heads, kv_heads in ((8, 8), (32, 8), (71, 1), (128, 2)):
            blocks = kv_heads * -(-heads // kv_heads // decode_tile(variant).rows)
            assert merge_counters(heads, kv_heads) >= blocks


@pytest.mark.kernels
@pytest.mark.parametrize("variant", SIZES, ids=str)
def test_the_kernel_has_the_same_sizes(variant: Variant) -> None:
    source = "decode_fma.cuh" if variant.dtype == "float32" else "decode_mma.cuh"
    text = translation_unit(source) + (
        "struct Params { int* out; };\n"
        'extern "C" __global__ void probe(const Params p) {\n'
        "    const int sizes[] = {TILE, BLOCK_ROWS, THREADS, SHARED_BYTES, SPLIT_TOKENS};\n"
        "    for (int i = 0; i < 5; ++i) p.out[i] = sizes[i];\n}\n"
    )
    out = np.zeros(5, np.int32)
    params: Any = np.array((address(out),), np.dtype([("out", "u8")]))
    macros = [f"-D{name}={value}" for name, value in variant.macros().items()] + ["-Wno-unused-function"]
    HostLauncher().run_text("probe", text, macros, (1, 1, 1), 32, 0, params)
    tile = decode_tile(variant)
    assert out.tolist() == [tile.keys, tile.rows, tile.threads, tile.shared_bytes, SPLIT_TOKENS]


def test_thread_blocks_fit_every_gpu() -> None:
    """The least is 99 KiB (sm_86, sm_89, sm_120). Three fit an H200's SM (228 KiB, each costs 1 KiB more) at the usual
    head sizes."""
    for variant in all_variants():
        assert decode_tile(variant).shared_bytes <= 99 << 10, variant
        if variant.head_size <= 128 and variant.dtype != "float32":
            assert 3 * (decode_tile(variant).shared_bytes + 1024) <= 228 << 10, variant
