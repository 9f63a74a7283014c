"""`prefill_wgmma.cu` on the CPU, against the twin: what `test_prefill.py` and `test_prefill_split.py` ask of the other
kernel, of its variants.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
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

from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRule
from pagekv.kernels.variants import BLOCK_SIZES, KERNELS, Variant, all_variants

HALF = Variant("float16", "float16", 128)
SHORT = replace(HALF, head_size=64, features=True)
PRESENT = [variant for variant in all_variants() if KERNELS["pagekv_prefill_wgmma"].serves(variant)]
ALL_FEATURES = Features(window=90, soft_cap=5.0, sinks=True)
WIDE_WINDOW = Features(window=150, soft_cap=5.0, sinks=True)
RULE = SplitRule(most_whole=100, least_log2=7, most_splits=4)
"""A short rule: a few hundred keys are a long context."""


def long_batch(variant: Variant, *, group: int = 2) -> Prompts:
    """Tiles of several sequences, rings that go round, chunks on both sides of tiles and cuts."""
    counts, contexts = [70, 1, 0, 33, 1, 2, 12, 130], [700, 130, 17, 33, 513, 0, 106, 390]
    return random_prompts(np.random.default_rng(0), variant, counts, contexts, group=group)


# --- results


@pytest.mark.parametrize("variant", PRESENT, ids=str)
def test_a_mixed_batch_of_every_variant(launcher: HostLauncher, variant: Variant) -> None:
    """Chunks, whole prompts, single tokens, empty sequences and rows without keys, in one launch."""
    assert len(PRESENT) == 8
    features = ALL_FEATURES if variant.features else PLAIN
    check(launcher, mixed_batch(variant, group=2), features, wgmma=True)


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", [HALF, SHORT], ids=str)
def test_chunks_behind_long_contexts(launcher: HostLauncher, variant: Variant) -> None:
    check(launcher, long_batch(variant), wgmma=True)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(launcher: HostLauncher, block_size: int) -> None:
    check(launcher, mixed_batch(HALF, group=1), block_size=block_size, wgmma=True)


@pytest.mark.parametrize("group", [1, 4, 7, 8, 64])
def test_groups_of_any_width(launcher: HostLauncher, group: int) -> None:
    """Rows of a tile are (query, head) pairs; tiles may begin between the heads of a query."""
    prompts = random_prompts(np.random.default_rng(0), HALF, [29, 3], [160, 102], group=group, kv_heads=2)
    check(launcher, prompts, wgmma=True)


@pytest.mark.parametrize(
    "features",
    [PLAIN, Features(window=1), Features(window=40), Features(soft_cap=1.0), Features(sinks=True)],
    ids=str,
)
def test_each_feature(launcher: HostLauncher, features: Features) -> None:
    check(launcher, mixed_batch(replace(HALF, features=True)), features, wgmma=True)


def test_huge_logits_do_not_overflow(launcher: HostLauncher) -> None:
    """Logits of +-1e4; almost every weight is 0, and the largest is 1."""
    rng = np.random.default_rng(5)
    prompts = random_prompts(rng, HALF, [40], [150], group=2, logit_size=1e4)
    assert worst_error(prompts, run_stored(launcher, rng, prompts, wgmma=True)) <= 20 * TOLERANCE["float16"]


@pytest.mark.sanitize
@pytest.mark.parametrize("rule", [SPLIT_RULE, RULE], ids=["whole", "split"])
def test_blocks_that_the_window_has_left_are_not_read(launcher: HostLauncher, rule: SplitRule) -> None:
    """Their block table entries may lead anywhere: the manager may have given the blocks to someone else."""
    window, block_size = 110, 16
    prompts = random_prompts(np.random.default_rng(7), SHORT, [30], [433], group=2)
    cache = store(np.random.default_rng(7), prompts.sequences, block_size)
    cache.tables[0, : (433 - 30 - window + 1) // block_size] = NOWHERE
    features = Features(window=window)
    for plan_window in (window, 0):
        result = run_prefill(launcher, prompts, cache, features, plan_window=plan_window, rule=rule, wgmma=True)
        assert worst_error(prompts, result, features) <= TOLERANCE["float16"]


def test_padded_items_do_nothing(launcher: HostLauncher) -> None:
    prompts = mixed_batch(HALF, group=2)
    result = run_stored(launcher, np.random.default_rng(1), prompts, padding=3, wgmma=True)
    same_bits(result, run_stored(launcher, np.random.default_rng(1), prompts, wgmma=True))


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("variant", "features"), [(HALF, PLAIN), (SHORT, WIDE_WINDOW), (replace(SHORT, features=False), PLAIN)], ids=str
)
def test_prompts_are_split_over_their_keys(launcher: HostLauncher, variant: Variant, features: Features) -> None:
    check(launcher, long_batch(variant), features, rule=RULE, wgmma=True)


# --- bits


@pytest.mark.parametrize(
    ("variant", "features", "rule"),
    [(HALF, PLAIN, SPLIT_RULE), (SHORT, Features(window=170, soft_cap=5.0, sinks=True), RULE)],
    ids=["plain", "split with features"],
)
@pytest.mark.parametrize("group", [1, 7])
def test_bits_do_not_depend_on_chunks_batch_blocks_or_block_size(
    launcher: HostLauncher, variant: Variant, features: Features, rule: SplitRule, group: int
) -> None:
    """A prompt computed whole and alone, against chunks of it among others, scattered elsewhere."""
    rng = np.random.default_rng(3)
    length = 270
    prompts = random_prompts(rng, variant, [length, 5, 90], [length, 77, 90], group=group, kv_heads=1)
    whole = run_stored(launcher, rng, prompts.chunk(0, 0, length), features, block_size=16, rule=rule, wgmma=True)
    ends = [1, 2, 60, 128, 129, length]
    for begin, end, block_size in zip([0, *ends], ends, [1, 256, 8, 64, 2, 32], strict=False):
        others = [prompts.chunk(1, 72, 77), prompts.chunk(2, 0, int(rng.integers(1, 90)))]
        place = int(rng.integers(0, 3))
        batch = together([*others[:place], prompts.chunk(0, begin, end), *others[place:]])
        result = run_stored(launcher, rng, batch, features, block_size=block_size, rule=rule, wgmma=True)
        same_bits(result[batch.rows()[place]], whole[begin:end])


def test_later_tokens_change_no_bit(launcher: HostLauncher) -> None:
    """Keys and values of tokens behind a position are huge instead."""
    rng = np.random.default_rng(4)
    prompts = random_prompts(rng, HALF, [100], [130], group=2)
    before = run_stored(launcher, rng, prompts, wgmma=True)
    changed = 95  # the row at position 95 is row 65
    for parts in (prompts.sequences.keys, prompts.sequences.values):
        parts[0] = parts[0].copy()
        parts[0][changed:] = twin.encode(rng.normal(size=parts[0][changed:].shape) * 1e4, "float16")
    after = run_stored(launcher, rng, prompts, wgmma=True)
    same_bits(after[: changed - 30], before[: changed - 30])
    assert (after[changed - 30 :] != before[changed - 30 :]).any(axis=(1, 2)).all()
