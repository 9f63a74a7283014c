"""The bits of a row's decode do not depend on batch, blocks, plan or launch."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernels.decode_cases import run_decode
from support.kernels.host_build import HostLauncher
from support.kernels.stored_sequences import Cache, Features, Sequences, random_sequences, same_bits, store

from pagekv.kernels.variants import Variant

VARIANTS = [
    Variant("float32", "float32", 64, True),
    Variant("bfloat16", "bfloat16", 128, True),
    Variant("float16", "float8_e4m3fn", 128, True),
]
LENGTHS = [600, 1, 257, 90, 0, 512]
FEATURES = Features(window=400, soft_cap=5.0, sinks=True)

pytestmark = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def sequences_of(variant: Variant) -> Sequences:
    return random_sequences(np.random.default_rng(0), variant, LENGTHS, group=4, kv_heads=2, shared=200)


def cache_of(sequences: Sequences, block_size: int = 16, seed: int = 1, *, shared: int = 0) -> Cache:
    return store(np.random.default_rng(seed), sequences, block_size, shared=shared)


def test_whatever_else_is_in_the_batch(launcher: HostLauncher, variant: Variant) -> None:
    sequences = sequences_of(variant)
    whole = run_decode(launcher, sequences, cache_of(sequences), FEATURES)
    for order in ([0], [2, 0], [5, 4, 3, 2, 1, 0], [3, 3, 0, 0]):
        some = sequences.pick(order)
        same_bits(run_decode(launcher, some, cache_of(some), FEATURES), whole[order])


def test_long_rows_beside_short_ones(launcher: HostLauncher, variant: Variant) -> None:
    """Rows whose splits have three lengths, in blocks of any size, however many partial results the merge waits for."""
    sequences = random_sequences(np.random.default_rng(3), variant, [4097, 4096, 16500, 30], group=2, kv_heads=1)
    features = Features(window=4200, sinks=True)
    whole = run_decode(launcher, sequences, cache_of(sequences), features)
    alone = [run_decode(launcher, one, cache_of(one, 1), features) for one in (sequences.pick([i]) for i in range(4))]
    same_bits(np.concatenate(alone), whole)
    same_bits(run_decode(launcher, sequences, cache_of(sequences, 256), features, fused=False, blocks=3), whole)


def test_whichever_blocks_of_whatever_size(launcher: HostLauncher, variant: Variant) -> None:
    """A contiguous cache is one whose blocks hold whole splits; paging changes no bit."""
    sequences = sequences_of(variant)
    contiguous = run_decode(launcher, sequences, cache_of(sequences, 256), FEATURES)
    for block_size in (1, 2, 16, 128, 256):
        for seed, shared in ((2, 0), (3, 200)):
            cache = cache_of(sequences, block_size, seed, shared=shared)
            same_bits(run_decode(launcher, sequences, cache, FEATURES), contiguous)


def test_however_it_is_launched(launcher: HostLauncher, variant: Variant) -> None:
    """Any grid, padded items, counters used again, either merge, a plan that leaves splits out or does not, and either
    order of blocks, warps and threads."""
    sequences = sequences_of(variant)
    cache = cache_of(sequences)
    once = run_decode(launcher, sequences, cache, FEATURES)
    same_bits(run_decode(HostLauncher(), sequences, cache, FEATURES), once)
    for blocks in (1, 5, 1000):
        same_bits(run_decode(launcher, sequences, cache, FEATURES, blocks=blocks), once)
    same_bits(run_decode(launcher, sequences, cache, FEATURES, padding=40), once)
    same_bits(run_decode(launcher, sequences, cache, FEATURES, padding=40, blocks=7), once)
    same_bits(run_decode(launcher, sequences, cache, FEATURES, launches=3), once)
    same_bits(run_decode(launcher, sequences, cache, FEATURES, fused=False), once)
    for fused in (True, False):
        same_bits(run_decode(launcher, sequences, cache, FEATURES, plan_window=0, fused=fused), once)


def test_whatever_comes_after(launcher: HostLauncher, variant: Variant) -> None:
    """Slots past the context, with NaN or with earlier tokens, are never read."""
    sequences = sequences_of(variant)
    cache = cache_of(sequences, 64)
    result = run_decode(launcher, sequences, cache, FEATURES)
    nan = cache.pool == cache.pool if variant.kv_dtype == "float32" else cache.pool != np.iinfo(cache.pool.dtype).max
    overwritten = Cache(np.where(nan, cache.pool, cache.pool.dtype.type(1)), cache.tables, cache.layer)
    same_bits(run_decode(launcher, sequences, overwritten, FEATURES), result)


def test_many_splits_merge_alike_in_either_kernel(launcher: HostLauncher, variant: Variant) -> None:
    """Nineteen partial results are more than two for each strand of the merge."""
    sequences = random_sequences(np.random.default_rng(1), variant, [256 * 18 + 100, 256 * 9], group=2, kv_heads=1)
    cache = cache_of(sequences)
    same_bits(run_decode(launcher, sequences, cache), run_decode(launcher, sequences, cache, fused=False))
