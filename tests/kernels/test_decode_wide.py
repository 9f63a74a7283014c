"""`decode_wide.cu` on the CPU: splits that several rows share are read once, and every row keeps its bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.decode_cases import run_decode, worst_error
from support.kernels.host_build import HostLauncher
from support.kernels.stored_sequences import TOLERANCE, Features, Sequences, random_sequences, same_bits, store

from pagekv.kernels import shared_splits
from pagekv.kernels.variants import Variant

VARIANTS = [
    Variant("float32", "float32", 64, True),
    Variant("bfloat16", "bfloat16", 128, True),
    Variant("float16", "float16", 256, True),
    Variant("float16", "float8_e4m3fn", 128, True),
    Variant("bfloat16", "float8_e4m3fn", 256, True),
]
WINDOW = Features(window=400, soft_cap=5.0, sinks=True)


@pytest.fixture(autouse=True)
def every_saving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_splits, "MIN_SAVED", 1)


def sharing(variant: Variant, lengths: list[int], shared: int, group: int = 4, kv_heads: int = 2) -> Sequences:
    return random_sequences(np.random.default_rng(0), variant, lengths, group=group, kv_heads=kv_heads, shared=shared)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("features", [Features(), WINDOW], ids=["full", "window"])
def test_a_shared_prefix_changes_no_bit(launcher: HostLauncher, variant: Variant, features: Features) -> None:
    """Rows that share two splits, among them one that ends with them; one shares a single split, one none."""
    lengths = [600, 1, 515, 512, 300, 0, 700]
    sequences = sharing(variant, lengths, 520)
    cache = store(np.random.default_rng(1), sequences, 16, shared=520)
    alone = run_decode(launcher, sequences, cache, features)
    assert worst_error(sequences, alone, features) <= TOLERANCE[variant.dtype]
    for fused in (True, False):
        same_bits(run_decode(launcher, sequences, cache, features, share=True, fused=fused), alone)
    # The items of the widest window serve layers with a smaller one, and padded ones do nothing.
    same_bits(run_decode(launcher, sequences, cache, features, share=True, plan_window=0, padding=5, launches=2), alone)


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=str)
def test_the_other_members_change_no_bit(launcher: HostLauncher, variant: Variant) -> None:
    """A row's place among the members, their number, and the row tile it lies in are nothing to it."""
    sequences = sharing(variant, [530] * 19, 520, group=3, kv_heads=1)
    cache = store(np.random.default_rng(1), sequences, 8, shared=520)
    alone = run_decode(launcher, sequences, cache)
    for order in (list(range(19)), [18, 3, 7], [5, 5, 5, 5, 0, 1, 2], list(range(18, -1, -1))):
        some = sequences.pick(order)
        moved = store(np.random.default_rng(2), some, 8, shared=520)
        same_bits(run_decode(launcher, some, moved, share=True), alone[order])


@settings(max_examples=20, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    lengths=st.lists(st.integers(200, 800), min_size=2, max_size=7),
    block_size=st.sampled_from([1, 16, 256]),
    group=st.sampled_from([1, 2, 8, 17]),
    shared=st.sampled_from([256, 300, 800]),
    window=st.sampled_from([0, 100, 700]),
    seed=st.integers(0, 99),
)
def test_whatever_is_shared(
    launcher: HostLauncher,
    variant: Variant,
    lengths: list[int],
    block_size: int,
    group: int,
    shared: int,
    window: int,
    seed: int,
) -> None:
    features = Features(window=window)
    sequences = random_sequences(np.random.default_rng(seed), variant, lengths, group=group, kv_heads=1, shared=shared)
    cache = store(np.random.default_rng(1), sequences, block_size, shared=shared)
    together = run_decode(launcher, sequences, cache, features, share=True)
    assert worst_error(sequences, together, features) <= TOLERANCE[variant.dtype]
    same_bits(together, run_decode(launcher, sequences, cache, features))


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", VARIANTS[:1] + VARIANTS[3:4], ids=str)
def test_nothing_else_is_read(launcher: HostLauncher, variant: Variant) -> None:
    sequences = sharing(variant, [600, 65, 530], 520)
    cache = store(np.random.default_rng(1), sequences, 16, shared=520)
    result = run_decode(launcher, sequences, cache, WINDOW, share=True)
    assert worst_error(sequences, result, WINDOW) <= TOLERANCE[variant.dtype]
