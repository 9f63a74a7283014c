"""`decode.cu` and `merge.cu` on the CPU, against the float64 twin.

Unused slots of every pool hold NaN, and tables name blocks outside of the pool past a sequence's end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import twin
from support.kernels.decode_cases import run_decode, worst_error
from support.kernels.host_build import HostLauncher
from support.kernels.stored_sequences import PLAIN, TOLERANCE, Features, Sequences, random_sequences, same_bits, store

from pagekv.kernels.variants import Variant

# Every dtype, every head size, and each way that a tile, a ring and a thread block can look.
VARIANTS = [
    Variant(dtype, kv_dtype, size, features)
    for dtype, kv_dtype, size, features in [
        ("float32", "float32", 64, True),
        ("float32", "float32", 80, False),
        ("float32", "float32", 256, True),
        ("float16", "float16", 64, True),
        ("float16", "float16", 96, True),
        ("float16", "float16", 256, True),
        ("bfloat16", "bfloat16", 80, True),
        ("bfloat16", "bfloat16", 128, False),
        ("bfloat16", "bfloat16", 128, True),
        ("float16", "float8_e4m3fn", 80, True),
        ("float16", "float8_e4m3fn", 128, True),
        ("bfloat16", "float8_e4m3fn", 64, True),
        ("bfloat16", "float8_e4m3fn", 256, True),
    ]
]
SMALL = [variant for variant in VARIANTS if variant.head_size == 64]
# Every pair of types, in sizes that the emulation is quick with.
DRAWN = [variant for variant in VARIANTS if variant.features and variant.head_size <= 128]
ALL_FEATURES = Features(window=300, soft_cap=5.0, sinks=True)


def check(
    launcher: HostLauncher,
    sequences: Sequences,
    block_size: int,
    features: Features = PLAIN,
    *,
    shared: int = 0,
    fused: bool = True,
    tolerance: float = 1.0,
    plan_window: int | None = None,
) -> None:
    """`tolerance`: multiplies the usual one. `plan_window`: the widest window of any layer, where that is another."""
    cache = store(np.random.default_rng(1), sequences, block_size, shared=shared)
    result = run_decode(launcher, sequences, cache, features, fused=fused, plan_window=plan_window)
    error = worst_error(sequences, result, features)
    assert error <= tolerance * TOLERANCE[sequences.variant.dtype], f"differs from the twin by {error}"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_equals_the_twin(launcher: HostLauncher, variant: Variant) -> None:
    """Lengths around tiles and splits, an empty sequence, and one that is merged from three splits."""
    lengths = [1, 0, 63, 64, 65, 255, 256, 257, 530]
    sequences = random_sequences(np.random.default_rng(0), variant, lengths, group=3, kv_heads=2)
    check(launcher, sequences, 16)
    if variant.features:
        check(launcher, sequences, 16, ALL_FEATURES, fused=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", SMALL, ids=str)
def test_nothing_else_is_read(launcher: HostLauncher, variant: Variant) -> None:
    """Other sequences' blocks, other layers and slots past the end are poisoned under AddressSanitizer."""
    sequences = random_sequences(np.random.default_rng(9), variant, [1, 0, 65, 530], group=3, kv_heads=2)
    check(launcher, sequences, 16, ALL_FEATURES)
    check(launcher, sequences, 1)
    check(launcher, sequences, 256, fused=False)


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(DRAWN),
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    group=st.sampled_from([1, 2, 4, 7, 8, 32]),
    kv_heads=st.sampled_from([1, 2, 3]),
    shared=st.sampled_from([0, 100, 300]),
    features=st.builds(
        Features,
        window=st.sampled_from([0, 1, 16, 100, 700]),
        soft_cap=st.sampled_from([0.0, 3.0]),
        sinks=st.booleans(),
    ),
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_twin(
    launcher: HostLauncher,
    variant: Variant,
    lengths: list[int],
    block_size: int,
    group: int,
    kv_heads: int,
    shared: int,
    features: Features,
    fused: bool,
    seed: int,
) -> None:
    """Scattered, shared and partly filled blocks of any size, groups of any width."""
    sequences = random_sequences(
        np.random.default_rng(seed), variant, lengths, group=group, kv_heads=kv_heads, shared=shared
    )
    check(launcher, sequences, block_size, features, shared=shared, fused=fused)


@pytest.mark.parametrize(
    ("variant", "group"),
    [
        (Variant("float16", "float16", 64, True), 16),
        (Variant("float16", "float16", 64, True), 17),
        (Variant("float16", "float16", 64, True), 33),
        (Variant("float16", "float16", 64, True), 71),
        (Variant("float16", "float16", 256, True), 40),
        (Variant("bfloat16", "float8_e4m3fn", 64, True), 48),
        (Variant("float32", "float32", 64, True), 33),
    ],
    ids=str,
)
def test_groups_wider_than_a_row_tile_or_a_thread_block(launcher: HostLauncher, variant: Variant, group: int) -> None:
    """One KV head for many query heads (MQA); beyond a thread block's rows its neighbours have the rest."""
    sequences = random_sequences(np.random.default_rng(2), variant, [300, 90, 0], group=group, kv_heads=1)
    check(launcher, sequences, 32, PLAIN)


@pytest.mark.parametrize("variant", SMALL, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_neither_overflow_nor_lose_the_largest(launcher: HostLauncher, variant: Variant, sign: int) -> None:
    """Logits of +-1e4 and beyond. One key wins by far, so that rounding of logits changes no weight."""
    rng = np.random.default_rng(3)
    sequences = random_sequences(rng, variant, [1, 300, 520], group=2)
    for keys, length in zip(sequences.keys, sequences.context_lens, strict=True):
        values = np.zeros(keys.shape)
        values[:, :, 0] = sign
        values[rng.integers(length), :, 0] = 1.25 if sign > 0 else -0.75
        keys[...] = twin.encode(values, variant.kv_dtype)
    query = np.zeros(sequences.query.shape)
    query[:, :, 0] = 1.0
    sequences.query[...] = twin.encode(query, variant.dtype)
    huge = replace(sequences, scale=1e4)
    check(launcher, huge, 16)
    check(launcher, huge, 16, fused=False)


def test_keys_alike_are_weighed_alike(launcher: HostLauncher) -> None:
    """Over equal logits the result is the plain mean, however many partial results it is merged from."""
    variant = Variant("float32", "float32", 64, True)
    sequences = random_sequences(np.random.default_rng(4), variant, [256 * 5 + 1], group=2)
    sequences.query[...] = 0
    cache = store(np.random.default_rng(1), sequences, 16)
    mean = np.repeat(sequences.values[0].astype(np.float64).mean(axis=0), 2, axis=0)
    assert np.abs(run_decode(launcher, sequences, cache)[0] - mean).max() < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [64, 80])
def test_every_fp8_code_is_read_exactly(launcher: HostLauncher, dtype: str, size: int) -> None:
    """All 254 numbers, subnormals included. With one key a row's result is that key's value, rounded once."""
    variant = Variant(dtype, "float8_e4m3fn", size, True)
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    rows = -(-len(codes) // size)
    values = np.resize(codes, (rows, 1, 1, size))
    sequences = random_sequences(np.random.default_rng(5), variant, [1] * rows, kv_heads=1)
    exact = Sequences(variant, sequences.query, sequences.keys, list(values), 1.0)
    result = run_decode(launcher, exact, store(np.random.default_rng(1), exact, 4))
    np.testing.assert_array_equal(twin.decode(result, dtype), twin.decode(values[:, 0], "float8_e4m3fn"))
    # As keys: the logits' differences are seen in the weights. Half a code's step would be noticed.
    query = np.zeros((1, 1, size))
    query[0, 0, :] = 1.0
    keys = np.zeros((len(codes), 1, size), np.uint8)
    keys[np.arange(len(codes)), 0, np.arange(len(codes)) % size] = codes
    one = twin.encode(np.random.default_rng(6).uniform(-1, 1, keys.shape), "float8_e4m3fn")
    for scale in (1 / 64, 32.0):  # large codes, small codes
        check(launcher, Sequences(variant, twin.encode(query, dtype), [keys], [one], scale), 16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_hardwares_conversion_of_fp8_changes_no_bit(launcher: HostLauncher, dtype: str) -> None:
    """From compute capability 8.9 on, as the PTX manual defines it; no GPU has run it."""
    variant = Variant(dtype, "float8_e4m3fn", 64, True)
    sequences = random_sequences(np.random.default_rng(7), variant, [300, 17, 1], group=4)
    cache = store(np.random.default_rng(1), sequences, 16)
    hardware = HostLauncher(edit=lambda text: "#define PAGEKV_E4M3_CVT\n" + text)
    same_bits(run_decode(hardware, sequences, cache), run_decode(launcher, sequences, cache))


LONG_ROWS = [5000, 4096, 16384 + 300, 300]
"""Splits of 512, 256, 1024 and 256 keys: blocks of a split are looked up in several portions."""


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("features", [PLAIN, Features(window=700), Features(window=5000, sinks=True)], ids=str)
def test_long_rows_have_longer_splits(launcher: HostLauncher, features: Features, block_size: int) -> None:
    """In a model some of whose layers see everything, so that a window may begin within a split of any length."""
    variant = Variant("float16", "float16", 64, True)
    sequences = random_sequences(np.random.default_rng(8), variant, LONG_ROWS, kv_heads=1)
    check(launcher, sequences, block_size, features, plan_window=0)


@pytest.mark.parametrize(
    "variant",
    [Variant("float32", "float32", 64, True), Variant("bfloat16", "float8_e4m3fn", 256, True)],
    ids=str,
)
def test_the_longest_splits(launcher: HostLauncher, variant: Variant) -> None:
    """Of 2,048 keys, most of which a window leaves out."""
    sequences = random_sequences(np.random.default_rng(9), variant, [65536 + 2100], kv_heads=1)
    check(launcher, sequences, 128, Features(window=5000), plan_window=0)


def test_no_sequence_sees_another_ones_nan(launcher: HostLauncher) -> None:
    """A NaN of one sequence's own stays its own."""
    variant = Variant("float16", "float16", 64, True)
    sequences = random_sequences(np.random.default_rng(7), variant, [70, 300, 70])
    sequences.values[1][5] = np.nan
    result = run_decode(launcher, sequences, store(np.random.default_rng(1), sequences, 16))
    assert np.isnan(result[1]).all()
    assert worst_error(sequences.pick([0, 2]), result[[0, 2]]) <= TOLERANCE["float16"]


def test_keys_that_a_window_has_left_are_not_read(launcher: HostLauncher) -> None:
    """Their blocks may have been freed and hold anything."""
    variant = Variant("bfloat16", "bfloat16", 128, True)
    sequences = random_sequences(np.random.default_rng(8), variant, [700, 130], group=2)
    features = Features(window=90)
    cache = store(np.random.default_rng(1), sequences, 8)
    untouched = run_decode(launcher, sequences, cache, features)
    for s, length in enumerate(sequences.context_lens):
        left = np.arange((length - 90) // 8)
        cache.pool[cache.tables[s, left]] = 0xFFFF  # NaN
        cache.tables[s, left] = -1
    for plan_window in (90, 0):  # whether or not the plan leaves the splits out
        after = run_decode(launcher, sequences, cache, features, plan_window=plan_window)
        assert worst_error(sequences, after, features) <= TOLERANCE["bfloat16"]
        np.testing.assert_array_equal(after, untouched)


def test_a_split_far_before_the_window_reads_nothing(launcher: HostLauncher) -> None:
    """A plan for several layers has the items of the widest window; in other layers they may be wholly out of sight."""
    variant = Variant("float16", "float16", 64, True)
    sequences = random_sequences(np.random.default_rng(10), variant, [40_000], kv_heads=1)
    cache = store(np.random.default_rng(1), sequences, 1)
    features = Features(window=33)
    result = run_decode(launcher, sequences, cache, features, plan_window=0, fused=False)
    assert worst_error(sequences, result, features) <= TOLERANCE["float16"]
