"""`prefill.cu` on the CPU, against the twin: chunks of prompts and single tokens, through block tables.

Slots that no token has hold NaN, table entries past a sequence's end lead nowhere, shared memory starts as NaN, and
results are checked in both orders of threads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import twin
from support.kernels.host_build import HostLauncher
from support.kernels.prefill_cases import (
    Prompts,
    check,
    mixed_batch,
    random_prompts,
    run_prefill,
    run_stored,
    together,
    worst_error,
)
from support.kernels.stored_sequences import NOWHERE, PLAIN, TOLERANCE, Features, same_bits, store

from pagekv.kernels.variants import BLOCK_SIZES, DTYPE_PAIRS, HEAD_SIZES, Variant

PAIRS = [(dtype, kv_dtype) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes]
# One of each way through the source.
SANITIZED = [("float16", "float16"), ("float32", "float32"), ("float16", "float8_e4m3fn")]
HALF = Variant("float16", "float16", 128)
ALL_FEATURES = Features(window=90, soft_cap=5.0, sinks=True)


# --- results


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [pytest.param(*pair, marks=pytest.mark.sanitize if pair in SANITIZED else ()) for pair in PAIRS],
)
def test_a_mixed_batch_of_every_type(launcher: HostLauncher, dtype: str, kv_dtype: str) -> None:
    """Chunks, whole prompts, single tokens, empty sequences and rows without keys, in one launch."""
    check(launcher, mixed_batch(Variant(dtype, kv_dtype, 128)))


@pytest.mark.parametrize("head_size", [size for size in HEAD_SIZES if size != 128])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float8_e4m3fn")]
)
def test_every_head_size_with_every_feature(launcher: HostLauncher, dtype: str, kv_dtype: str, head_size: int) -> None:
    """Window and soft cap at once."""
    check(launcher, mixed_batch(Variant(dtype, kv_dtype, head_size, features=True), group=2), ALL_FEATURES)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(launcher: HostLauncher, block_size: int) -> None:
    check(launcher, mixed_batch(HALF, group=1), block_size=block_size)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_groups_of_any_width(launcher: HostLauncher, group: int) -> None:
    """Rows of a tile are (query, head) pairs; tiles may begin between the heads of a query."""
    check(launcher, mixed_batch(HALF, group=group))


@pytest.mark.parametrize("variant", [HALF, Variant("float32", "float32", 128)], ids=str)
def test_huge_logits_do_not_overflow(launcher: HostLauncher, variant: Variant) -> None:
    """Logits of +-1e4; almost every weight is 0, and the largest is 1."""
    rng = np.random.default_rng(5)
    prompts = random_prompts(rng, variant, [40], [150], group=2, logit_size=1e4)
    # Rounding of logits this size moves weights between keys that are nearly tied.
    assert worst_error(prompts, run_stored(launcher, rng, prompts)) <= 20 * TOLERANCE[variant.dtype]


def test_features_that_are_off_change_nothing_but_roundings(launcher: HostLauncher) -> None:
    prompts = mixed_batch(replace(HALF, features=True))
    check(launcher, prompts)
    # A window and a cap so wide that they do nothing.
    check(launcher, prompts, Features(window=10_000, soft_cap=200.0))


@pytest.mark.parametrize(
    "features", [Features(window=1), Features(window=40), Features(soft_cap=1.0), Features(sinks=True)], ids=str
)
def test_each_feature(launcher: HostLauncher, features: Features) -> None:
    check(launcher, mixed_batch(replace(HALF, features=True)), features)


@pytest.mark.sanitize
def test_blocks_that_the_window_has_left_are_not_read(launcher: HostLauncher) -> None:
    """Their block table entries may lead anywhere: the manager may have given the blocks to someone else."""
    rng = np.random.default_rng(7)
    window, block_size = 50, 16
    prompts = random_prompts(rng, replace(HALF, features=True), [30], [333], group=2)
    cache = store(rng, prompts.sequences, block_size)
    first_visible = 333 - 30 - window + 1
    cache.tables[0, : first_visible // block_size] = NOWHERE
    features = Features(window=window)
    result = run_prefill(launcher, prompts, cache, features)
    assert worst_error(prompts, result, features) <= TOLERANCE["float16"]


def test_padded_items_do_nothing(launcher: HostLauncher) -> None:
    prompts = mixed_batch(HALF)
    result = run_stored(launcher, np.random.default_rng(1), prompts, padding=3)
    same_bits(result, run_stored(launcher, np.random.default_rng(1), prompts))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Prompts, Features, int, int, int]:
    """Prompts, features, block size, shared tokens, seed. Few variants, because each is compiled."""
    dtype, kv_dtype = draw(st.sampled_from(PAIRS))
    features = draw(
        st.builds(
            Features,
            window=st.sampled_from([0, 1, 16, 65, 200]),
            soft_cap=st.sampled_from([0.0, 3.0]),
        )
    )
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 15, 63, 64, 65, 200])), min_size=1, max_size=4)
    )
    counts = [count for count, _ in shapes]
    contexts = [count + past for count, past in shapes]
    seed = draw(st.integers(0, 2**32 - 1))
    shared = draw(st.sampled_from([0, 20, 64]))
    prompts = random_prompts(
        np.random.default_rng(seed),
        Variant(dtype, kv_dtype, 64, features=True),
        counts,
        contexts,
        group=draw(st.sampled_from([1, 4, 7, 8])),
        kv_heads=draw(st.sampled_from([1, 2])),
        shared=shared,
        logit_size=draw(st.sampled_from([0.1, 2.0, 30.0])),
    )
    return prompts, features, draw(st.sampled_from(BLOCK_SIZES)), shared, seed


@settings(max_examples=15, deadline=None)
@given(case=batches(), reversed_order=st.booleans())
def test_any_batch_equals_the_twin(case: tuple[Prompts, Features, int, int, int], reversed_order: bool) -> None:
    """Odd lengths, shuffled and shared blocks, every type, features by chance."""
    prompts, features, block_size, shared, seed = case
    result = run_stored(
        HostLauncher(reversed_order=reversed_order),
        np.random.default_rng(seed),
        prompts,
        features,
        block_size=block_size,
        shared=shared,
    )
    # Sharper weights let roundings through: float32's of logits around 100 are 4e-6 each.
    assert worst_error(prompts, result, features) <= 2 * TOLERANCE[prompts.variant.dtype] + 3e-5


# --- bits


@pytest.mark.parametrize(
    ("variant", "features"),
    [
        (HALF, PLAIN),
        (Variant("bfloat16", "float8_e4m3fn", 64, features=True), Features(window=70, soft_cap=5.0, sinks=True)),
        (Variant("float32", "float32", 64, features=True), Features(window=70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 7])
def test_bits_do_not_depend_on_chunks_batch_blocks_or_block_size(
    variant: Variant, features: Features, group: int
) -> None:
    """A prompt computed whole and alone, against chunks of it among others, scattered elsewhere."""
    launcher = HostLauncher()
    rng = np.random.default_rng(3)
    length = 210
    prompts = random_prompts(rng, variant, [length, 5, 90], [length, 77, 90], group=group, kv_heads=1)
    whole = run_stored(launcher, rng, prompts.chunk(0, 0, length), features, block_size=16)
    ends = [1, 2, 60, 128, 129, length]
    for begin, end, block_size in zip([0, *ends], ends, [1, 256, 8, 64, 2, 32], strict=False):
        others = [prompts.chunk(1, 72, 77), prompts.chunk(2, 0, int(rng.integers(1, 90)))]
        place = int(rng.integers(0, 3))
        batch = together([*others[:place], prompts.chunk(0, begin, end), *others[place:]])
        result = run_stored(launcher, rng, batch, features, block_size=block_size)
        same_bits(result[batch.rows()[place]], whole[begin:end])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_bits_of_any_chunking_are_those_of_the_whole(data: st.DataObject) -> None:
    """With every chunk's context in blocks of its own, and nothing behind it but NaN."""
    variant = data.draw(
        st.sampled_from([replace(HALF, head_size=64, features=True), Variant("float32", "float32", 64, True)])
    )
    features = Features(window=data.draw(st.sampled_from([0, 33])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    length = data.draw(st.integers(1, 170))
    prompts = random_prompts(rng, variant, [length], [length], group=data.draw(st.sampled_from([1, 4, 7])), kv_heads=1)
    launcher = HostLauncher(reversed_order=data.draw(st.booleans()))
    whole = run_stored(launcher, rng, prompts, features)
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=3)) | {length})
    chunks = [prompts.chunk(0, begin, end) for begin, end in zip([0, *cuts], cuts, strict=False)]
    block_size = data.draw(st.sampled_from(BLOCK_SIZES))
    same_bits(run_stored(launcher, rng, together(chunks), features, block_size=block_size), whole)


@pytest.mark.parametrize("variant", [HALF, Variant("float32", "float32", 128)], ids=str)
def test_later_tokens_change_no_bit(variant: Variant) -> None:
    """Keys and values of tokens behind a position are huge instead."""
    rng = np.random.default_rng(4)
    prompts = random_prompts(rng, variant, [100], [130], group=2)
    before = run_stored(HostLauncher(), rng, prompts)
    changed = 95  # the row at position 95 is row 65
    for parts in (prompts.sequences.keys, prompts.sequences.values):
        parts[0] = parts[0].copy()
        parts[0][changed:] = twin.encode(rng.normal(size=parts[0][changed:].shape) * 1e4, variant.kv_dtype)
    after = run_stored(HostLauncher(), rng, prompts)
    same_bits(after[: changed - 30], before[: changed - 30])
    assert (after[changed - 30 :] != before[changed - 30 :]).any(axis=(1, 2)).all()
