"""Splits of `prefill.cu`, and `merge_rows.cu`, on the CPU, against the twin: prompts behind contexts that are split.

The rule of splitting is a short one here, so that a few hundred keys are a long context; one test has the rule that
serves. Memory of partial results starts as NaN, and so does every slot of the pool without a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import twin
from support.kernels.host_build import HostLauncher, address, aligned_empty
from support.kernels.prefill_cases import (
    Prompts,
    check,
    random_prompts,
    run_prefill,
    run_stored,
    together,
    worst_error,
)
from support.kernels.stored_sequences import NOWHERE, PLAIN, TOLERANCE, Features, same_bits, store

from pagekv.kernels import launch_config
from pagekv.kernels.params import MERGE, fill
from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRule
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES, Variant

RULE = SplitRule(most_whole=100, least_log2=6, most_splits=4)
PAIRS = [(dtype, kv_dtype) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes]
SANITIZED = [("float16", "float16"), ("float32", "float32"), ("float16", "float8_e4m3fn")]
HALF = Variant("float16", "float16", 64)
WIDE_WINDOW = Features(window=120, soft_cap=5.0, sinks=True)
"""A window that still splits, beside every other feature."""

# A chunk with splits of two lengths, a single token, no rows, a short prompt, a token, rows without keys, rows before
# and behind the first one that is split, rows on both sides of a cut.
COUNTS = [70, 1, 0, 33, 1, 2, 12, 5]
CONTEXTS = [300, 130, 17, 33, 513, 0, 106, 194]


def long_batch(variant: Variant, *, group: int = 2, seed: int = 0, **how: Any) -> Prompts:
    return random_prompts(np.random.default_rng(seed), variant, COUNTS, CONTEXTS, group=group, **how)


# --- results


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [pytest.param(*pair, marks=pytest.mark.sanitize if pair in SANITIZED else ()) for pair in PAIRS],
)
def test_a_mixed_batch_of_every_type(launcher: HostLauncher, dtype: str, kv_dtype: str) -> None:
    check(launcher, long_batch(Variant(dtype, kv_dtype, 128)), rule=RULE)


@pytest.mark.parametrize("head_size", [size for size in HEAD_SIZES if size != 128])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float8_e4m3fn")]
)
def test_every_head_size_with_every_feature(launcher: HostLauncher, dtype: str, kv_dtype: str, head_size: int) -> None:
    check(launcher, long_batch(Variant(dtype, kv_dtype, head_size, features=True)), WIDE_WINDOW, rule=RULE)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_block_sizes(launcher: HostLauncher, block_size: int) -> None:
    check(launcher, long_batch(HALF, group=1), rule=RULE, block_size=block_size)


@pytest.mark.parametrize(
    ("variant", "group"), [(HALF, 1), (HALF, 7), (HALF, 64), (Variant("float32", "float32", 256), 64)]
)
def test_groups_of_any_width(launcher: HostLauncher, variant: Variant, group: int) -> None:
    """Tiles begin between the heads of a query, and a query's heads may take several tiles."""
    prompts = random_prompts(np.random.default_rng(0), variant, [9, 3], [160, 102], group=group, kv_heads=1)
    check(launcher, prompts, rule=RULE)


@pytest.mark.parametrize(
    "features", [Features(window=101), Features(window=300), Features(soft_cap=1.0), Features(sinks=True)], ids=str
)
def test_each_feature(launcher: HostLauncher, features: Features) -> None:
    check(launcher, long_batch(replace(HALF, features=True)), features, rule=RULE)


def test_huge_logits_do_not_overflow(launcher: HostLauncher) -> None:
    """Logits of +-1e4: nearly all weight is in one split."""
    prompts = random_prompts(np.random.default_rng(5), HALF, [40], [330], group=2, logit_size=1e4)
    result = run_stored(launcher, np.random.default_rng(1), prompts, rule=RULE)
    assert worst_error(prompts, result) <= 20 * TOLERANCE["float16"]


@pytest.mark.sanitize
def test_blocks_that_the_window_has_left_are_not_read(launcher: HostLauncher) -> None:
    """Their entries in the block table lead nowhere, also where a wider window planned splits over them."""
    window, block_size = 110, 16
    prompts = random_prompts(np.random.default_rng(7), replace(HALF, features=True), [30], [433], group=2)
    cache = store(np.random.default_rng(7), prompts.sequences, block_size)
    cache.tables[0, : (433 - 30 - window + 1) // block_size] = NOWHERE
    features = Features(window=window)
    for plan_window in (window, 0):
        result = run_prefill(launcher, prompts, cache, features, rule=RULE, plan_window=plan_window)
        assert worst_error(prompts, result, features) <= TOLERANCE["float16"]


def test_the_rule_that_serves(launcher: HostLauncher) -> None:
    """Three rows before the first one that is split, three from it on."""
    most = SPLIT_RULE.most_whole
    prompts = random_prompts(np.random.default_rng(2), HALF, [6], [most + 3], kv_heads=1)
    result = run_stored(launcher, np.random.default_rng(1), prompts)
    assert worst_error(prompts, result) <= TOLERANCE["float16"]
    whole = run_stored(launcher, np.random.default_rng(1), prompts, rule=replace(SPLIT_RULE, most_whole=2 * most))
    same_bits(result[:3], whole[:3])
    assert (result[3:] != whole[3:]).any(), "other roundings: the rows were split"


@st.composite
def batches(draw: st.DrawFn) -> tuple[Prompts, Features, dict[str, Any], int]:
    """Prompts, features, how they are run, seed. Few variants, because each is compiled."""
    dtype, kv_dtype = draw(st.sampled_from(PAIRS))
    features = Features(window=draw(st.sampled_from([0, 1, 101, 130, 200])), soft_cap=draw(st.sampled_from([0.0, 3.0])))
    pasts = st.sampled_from([0, 63, 64, 99, 100, 191, 255, 256, 400])
    shapes = draw(st.lists(st.tuples(st.integers(0, 80), pasts), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    prompts = random_prompts(
        np.random.default_rng(seed),
        Variant(dtype, kv_dtype, 64, features=True),
        [count for count, _ in shapes],
        [count + past for count, past in shapes],
        group=draw(st.sampled_from([1, 4, 7])),
        kv_heads=draw(st.sampled_from([1, 2])),
        logit_size=draw(st.sampled_from([0.1, 2.0, 30.0])),
    )
    how = {
        "block_size": draw(st.sampled_from([1, 8, 64])),
        "plan_window": draw(st.sampled_from([None, 0])),
    }
    return prompts, features, how, seed


@settings(max_examples=15, deadline=None)
@given(case=batches(), reversed_order=st.booleans())
def test_any_batch_equals_the_twin(case: tuple[Prompts, Features, dict[str, Any], int], reversed_order: bool) -> None:
    prompts, features, how, seed = case
    launcher = HostLauncher(reversed_order=reversed_order)
    result = run_stored(launcher, np.random.default_rng(seed), prompts, features, rule=RULE, **how)
    assert worst_error(prompts, result, features) <= 2 * TOLERANCE[prompts.variant.dtype] + 3e-5


# --- bits


@pytest.mark.parametrize(
    ("variant", "features"),
    [
        (HALF, PLAIN),
        (Variant("bfloat16", "float8_e4m3fn", 64, features=True), WIDE_WINDOW),
        (Variant("float32", "float32", 64, features=True), Features(window=130)),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 7])
def test_bits_do_not_depend_on_chunks_batch_blocks_or_block_size(
    variant: Variant, features: Features, group: int
) -> None:
    """A prompt computed whole and alone, against chunks of it among others, scattered elsewhere."""
    launcher, rng, length = HostLauncher(), np.random.default_rng(3), 280
    prompts = random_prompts(rng, variant, [length, 5, 90], [length, 177, 90], group=group, kv_heads=1)
    whole = run_stored(launcher, rng, prompts.chunk(0, 0, length), features, rule=RULE)
    ends = [2, 99, 102, 129, 200, 256, length]
    for begin, end, block_size in zip([0, *ends], ends, [1, 256, 8, 64, 2, 32, 16], strict=False):
        others = [prompts.chunk(1, 172, 177), prompts.chunk(2, 0, int(rng.integers(1, 90)))]
        place = int(rng.integers(0, 3))
        batch = together([*others[:place], prompts.chunk(0, begin, end), *others[place:]])
        result = run_stored(launcher, rng, batch, features, rule=RULE, block_size=block_size)
        same_bits(result[batch.rows()[place]], whole[begin:end])


def test_rows_that_see_few_keys_are_as_they_are_without_splits() -> None:
    """To the bit, and so are all rows of a layer whose window is short, whatever its neighbours' windows are."""
    launcher, never = HostLauncher(), replace(RULE, most_whole=1000, least_log2=10)
    prompts = random_prompts(np.random.default_rng(3), replace(HALF, features=True), [140], [140], group=2)
    whole = run_stored(launcher, np.random.default_rng(1), prompts, rule=never)
    split = run_stored(launcher, np.random.default_rng(1), prompts, rule=RULE)
    same_bits(split[:100], whole[:100])
    assert (split[100:] != whole[100:]).any()
    short = Features(window=70)
    whole = run_stored(launcher, np.random.default_rng(1), prompts, short, rule=never)
    same_bits(run_stored(launcher, np.random.default_rng(1), prompts, short, rule=RULE, plan_window=0), whole)


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_merges_give_the_same_bits(launcher: HostLauncher, dtype: str, head_size: int) -> None:
    """Rows of 1 to 17 partial results, and of 64 as decodes have them, some of no keys, with sinks; entries of rows
    that are not split between them."""
    rng, heads = np.random.default_rng(0), 5
    partials = np.append(np.arange(1, 18), 64)
    first = np.cumsum(partials) - partials
    states = np.stack([rng.normal(size=(partials.sum(), heads)) * 20, rng.uniform(1, 9, (partials.sum(), heads))], 2)
    states[rng.random(states.shape[:2]) < 0.3] = -np.inf, 0
    state = np.ascontiguousarray(states, np.float32)
    out = rng.normal(size=(partials.sum(), heads, head_size)).astype(np.float32)
    out[state[:, :, 1] == 0] = 0
    items = np.full((2 * len(partials), 4), -1, np.int32)
    items[::2] = np.stack([np.arange(len(partials)), first, partials, np.zeros_like(first)], axis=1)
    sinks = rng.normal(size=heads).astype(np.float32)
    variant = Variant(dtype, dtype, head_size)
    results = []
    for kernel, shape in (("pagekv_merge", launch_config.merge), ("pagekv_merge_rows", launch_config.merge_rows)):
        rows = aligned_empty((len(partials), heads, head_size), twin.STORAGE[dtype])
        params = fill(
            MERGE,
            out=address(rows),
            partial_out=address(out),
            partial_state=address(state),
            sinks=address(sinks),
            items=address(items),
            out_stride=heads * head_size,
            num_heads=heads,
        )
        launcher.launch(kernel, variant, shape(variant, len(items), heads), params)
        results.append(rows)
    same_bits(*results)
    assert np.isfinite(twin.decode(results[1], dtype)).all()
