"""`cache_write.cu` and `cache_write_together.cu` on the CPU, against the twin: every key and value at exactly the slot
that was named.

The pool is NaN bytes all over before; what no slot names must stay so, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import twin
from support.kernels.host_build import HostLauncher, address, aligned_empty
from support.kernels.planted_faults import Fault, assert_noticed, visible

from pagekv.kernels import launch_config
from pagekv.kernels.params import CACHE_WRITE, fill
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES, Variant

Array = npt.NDArray[Any]
PAIRS = [(dtype, kv_dtype) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes]
NAME, TOGETHER = "pagekv_cache_write", "pagekv_cache_write_together"
# Least steps between two stored elements of this size, relative: what one rounding may differ by.
NORM_EPS = 0.3
STEP = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}


@dataclass
class Case:
    """One launch: geometry, slots, and whether keys and queries are normed and rotated."""

    variant: Variant
    num_tokens: int
    num_heads: int = 0
    num_kv_heads: int = 2
    block_size: int = 16
    num_blocks: int = 4
    num_layers: int = 2
    layer: int = 1
    rotary_dim: int = 0
    normed: bool = False
    together: bool = False
    """With `normed`: one norm over all queries and one over all keys."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0
    skipped: tuple[int, ...] = ()

    def run(self, launcher: HostLauncher) -> None:
        """Launches, and compares pool and queries with the twin's."""
        rng = np.random.default_rng(self.seed)
        dtype, kv_dtype, size = self.variant.dtype, self.variant.kv_dtype, self.variant.head_size
        shape = (self.num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, size)
        pool = aligned_empty(shape, twin.STORAGE[kv_dtype])
        expected = pool.copy()
        # Keys, values and queries side by side in a row, as a fused projection leaves them.
        heads = self.num_heads + 2 * self.num_kv_heads
        rows = aligned_empty((self.num_tokens, heads, size), twin.STORAGE[dtype])
        rows[:] = twin.encode(rng.normal(size=rows.shape) * 4, dtype)
        query, key, value = np.split(rows, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        before = twin.decode(rows, dtype)
        exact_query, exact_key, exact_value = np.split(
            before, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1
        )
        slots = rng.permutation(self.num_blocks * self.block_size)[: self.num_tokens].astype(np.int32)
        slots[list(self.skipped)] = -1
        positions = rng.integers(0, 50, self.num_tokens).astype(np.int32)
        angles = rng.uniform(0, 6, size=(50, self.rotary_dim // 2))
        rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

        # Every head has half the scale of the one before it.
        halves = 0.5 ** np.arange(self.num_kv_heads)
        scales = np.stack([self.k_scale * halves, self.v_scale * halves]).astype(np.float32)
        of_keys_and_queries = self.num_heads + self.num_kv_heads
        norm_weight = rng.uniform(0.5, 2, size=(of_keys_and_queries, size)).astype(np.float32)
        kernel, config = NAME, launch_config.cache_write(self.variant, self.num_tokens, of_keys_and_queries)
        if self.together:
            kernel, config = TOGETHER, launch_config.cache_write_together(self.num_tokens)
        kv_stride = self.block_size * self.num_kv_heads * size
        params = fill(
            CACHE_WRITE,
            key=address(key),
            value=address(value),
            query=address(query) if self.num_heads else 0,
            pool=address(pool),
            slots=address(slots),
            rope=address(rope) if self.rotary_dim else 0,
            positions=address(positions),
            block_stride=self.num_layers * 2 * kv_stride,
            kv_stride=kv_stride,
            key_stride=heads * size,
            value_stride=heads * size,
            query_stride=heads * size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            block_size_log2=self.block_size.bit_length() - 1,
            layer=self.layer,
            rotary_dim=self.rotary_dim,
            kv_scales=address(scales),
            norm_weight=address(norm_weight) if self.normed else 0,
            norm_eps=NORM_EPS,
        )
        owned = np.unique(slots[slots >= 0] // self.block_size)
        foreign = [pool[block] for block in range(self.num_blocks) if block not in owned]
        with launcher.forbidden(*foreign):
            launcher.launch(kernel, self.variant, config, params)

        if self.normed:
            exact_query, exact_key = (
                twin.decode(twin.encode(self._norm(heads, weight), dtype), dtype)
                for heads, weight in zip((exact_query, exact_key), np.split(norm_weight, [self.num_heads]), strict=True)
            )
        if self.rotary_dim:
            exact_key = twin.rotate(exact_key, rope, positions)
            exact_query = twin.rotate(exact_query, rope, positions)
        of_heads = scales.astype(np.float64)[:, :, None] if kv_dtype == "float8_e4m3fn" else np.ones((2, 1, 1))
        twin.write(expected, self.layer, exact_key / of_heads[0], exact_value / of_heads[1], slots, kv_dtype=kv_dtype)
        # Only norms, rotation and inexact scales compute in float32 before the rounding.
        powers_of_two = np.frexp([self.k_scale, self.v_scale])[0].tolist() == [0.5, 0.5]
        unchanged = not self.rotary_dim and not self.normed
        exact = unchanged and (kv_dtype != "float8_e4m3fn" or powers_of_two)
        # A number that is rounded the other way between norm and rotation is a step of its size off, which rotation may
        # cancel.
        twice = 16 * STEP[dtype] if self.normed and self.rotary_dim else 0.0
        assert_stored_alike(pool, expected, kv_dtype, exact=exact, beside=twice)
        kept = slots >= 0
        after = twin.decode(rows, dtype)
        np.testing.assert_array_equal(after[:, self.num_heads :], before[:, self.num_heads :], "keys, values: as given")
        np.testing.assert_array_equal(after[~kept], before[~kept], "rows without a slot are left alone")
        wanted = twin.encode(exact_query[kept], dtype)
        assert_stored_alike(rows[kept, : self.num_heads], wanted, dtype, exact=unchanged, beside=twice)

    def _norm(self, heads: Array, weight: Array) -> Array:
        """`heads`: of one kind, [tokens, heads, head size]; `weight`: [heads, head size]."""
        if not self.together:
            return twin.norm(heads, weight, NORM_EPS)
        return twin.norm(heads.reshape(len(heads), -1), weight.reshape(-1), NORM_EPS).reshape(heads.shape)


def assert_stored_alike(actual: Array, expected: Array, dtype: str, *, exact: bool, beside: float = 0.0) -> None:
    """Bit for bit, or to one step of the type where float32 arithmetic came before the rounding, and `beside`; NaN only
    for NaN.
    """
    if exact:
        np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))
        return
    left, right = twin.decode(actual, dtype), twin.decode(expected, dtype)
    # Sums of two products of opposite signs have the error of what they cancel: values of up to about 16.
    smallest = (2.0**-9 if dtype == "float8_e4m3fn" else 2e-6) + beside
    np.testing.assert_allclose(left, right, rtol=STEP[dtype], atol=smallest)
    if dtype != "float32":
        differ = np.count_nonzero((left != right) & ~np.isnan(right))
        assert differ <= 3 + 0.005 * np.count_nonzero(~np.isnan(right))


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_keys_and_values_land_in_their_slots(launcher: HostLauncher, dtype: str, kv_dtype: str) -> None:
    """Shuffled slots over shuffled blocks, a skipped row, one layer of two."""
    variant = Variant(dtype, kv_dtype, 128)
    Case(variant, 13, num_kv_heads=3, skipped=(0, 7), k_scale=0.5, v_scale=2.0).run(launcher)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size(launcher: HostLauncher, head_size: int, normed: bool) -> None:
    variant = Variant("float16", "float16", head_size)
    Case(variant, 5, num_heads=7, num_kv_heads=5, rotary_dim=head_size, normed=normed).run(launcher)


# Every pair of types, and every head size with types that differ.
NORMED_TOGETHER = [Variant(*pair, 128) for pair in PAIRS if pair != ("float16", "float8_e4m3fn")] + [
    pytest.param(Variant("float16", "float8_e4m3fn", size), marks=pytest.mark.sanitize) for size in HEAD_SIZES
]


@pytest.mark.parametrize("variant", NORMED_TOGETHER, ids=str)
def test_one_norm_of_all_queries_and_one_of_all_keys(launcher: HostLauncher, variant: Variant) -> None:
    """More heads of either kind than a thread block has at a time, the last of them not all there; a skipped row."""
    head_size = variant.head_size
    Case(variant, 3, 21, 17, num_blocks=2, rotary_dim=head_size // 2, normed=True, together=True, skipped=(1,)).run(
        launcher
    )


def test_a_norm_of_all_heads_does_not_depend_on_the_batch(launcher: HostLauncher) -> None:
    """A token's keys and queries alone and among others, to the bit."""
    rng, variant = np.random.default_rng(4), Variant("float16", "float16", 64)
    rows = twin.encode(rng.normal(size=(5, 19, 64)), "float16")
    weight = rng.uniform(0.5, 2, size=(16, 64)).astype(np.float32)
    found = []
    for tokens in (range(5), [3]):
        given = aligned_empty((len(tokens), 19, 64), rows.dtype)
        given[:] = rows[list(tokens)]
        pool = aligned_empty((1, 1, 2, 8, 3, 64), rows.dtype)
        slots = np.arange(len(tokens), dtype=np.int32)
        params = fill(
            CACHE_WRITE,
            key=address(given[:, 13:]),
            value=address(given[:, 16:]),
            query=address(given),
            pool=address(pool),
            slots=address(slots),
            rope=0,
            positions=address(slots),
            kv_scales=0,
            norm_weight=address(weight),
            block_stride=2 * 8 * 3 * 64,
            kv_stride=8 * 3 * 64,
            key_stride=19 * 64,
            value_stride=19 * 64,
            query_stride=19 * 64,
            num_heads=13,
            num_kv_heads=3,
            block_size_log2=3,
            layer=0,
            rotary_dim=0,
            norm_eps=NORM_EPS,
        )
        launcher.launch(TOGETHER, variant, launch_config.cache_write_together(len(tokens)), params)
        at = list(tokens).index(3)
        found.append((given[at, :13].copy(), pool[0, 0, 0, at].copy()))
    for alone, among in zip(*found, strict=True):
        np.testing.assert_array_equal(alone.view(np.uint16), among.view(np.uint16))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shapes at which something could go wrong; head sizes and types stay few, because each pair is compiled."""
    dtype, kv_dtype = draw(st.sampled_from(PAIRS))
    variant = Variant(dtype, kv_dtype, draw(st.sampled_from([64, 80])))
    block_size = draw(st.sampled_from([1, 2, 16, 256]))
    num_blocks = draw(st.integers(1, 40 if block_size < 16 else 5))
    num_tokens = draw(st.integers(1, min(20, block_size * num_blocks)))
    num_layers = draw(st.integers(1, 3))
    normed = draw(st.booleans())
    together = normed and draw(st.booleans())
    return Case(
        variant,
        num_tokens,
        num_heads=draw(st.sampled_from([1, 6, 17] if together else [0, 1, 6, 17])),
        num_kv_heads=draw(st.sampled_from([1, 2, 8, 17])),
        block_size=block_size,
        num_blocks=num_blocks,
        num_layers=num_layers,
        layer=draw(st.integers(0, num_layers - 1)),
        rotary_dim=2 * draw(st.integers(0, variant.head_size // 2)),
        normed=normed,
        together=together,
        k_scale=draw(st.sampled_from([1.0, 0.25, 0.0123])),
        v_scale=draw(st.sampled_from([1.0, 3.7])),
        seed=draw(st.integers(0, 100)),
        skipped=tuple(draw(st.sets(st.integers(0, num_tokens - 1), max_size=num_tokens // 2))),
    )


@settings(max_examples=60)
@given(case=cases())
def test_any_shape_is_written_as_the_twin_writes_it(launcher: HostLauncher, case: Case) -> None:
    case.run(launcher)


def test_fp8_values_beyond_its_range_saturate(launcher: HostLauncher) -> None:
    """Scales that are too small for the values: 448 times the scale comes back, never NaN."""
    Case(Variant("bfloat16", "float8_e4m3fn", 64), 8, k_scale=1e-3, v_scale=1e-4).run(launcher)


def check_rotation(launcher: HostLauncher) -> None:
    Case(Variant("float16", "float16", 128), 7, 6, 3, rotary_dim=96, skipped=(2,), num_blocks=3).run(launcher)


def check_norm(launcher: HostLauncher) -> None:
    Case(Variant("float16", "float16", 80), 5, 13, 3, normed=True, rotary_dim=80, num_blocks=3).run(launcher)


def check_together(launcher: HostLauncher) -> None:
    variant = Variant("float16", "float16", 80)
    Case(variant, 3, 29, 14, normed=True, together=True, rotary_dim=80, num_blocks=3).run(launcher)


def check_fp8(launcher: HostLauncher) -> None:
    Case(Variant("float16", "float8_e4m3fn", 64), 7, num_blocks=3, k_scale=0.25, v_scale=2.0).run(launcher)


FAULTS = [
    Fault("no barrier before partners", NAME, "__syncthreads();  // every partner", "//", check_rotation),
    Fault("the next block", NAME, "= slot >> p.block_size_log2", "= 1 + (slot >> p.block_size_log2)", check_rotation),
    Fault("the next slot", NAME, "= slot & (", "= (slot + 1) & (", check_rotation),
    Fault("another layer", NAME, "p.layer * 2 * p.kv_stride", "p.layer * p.kv_stride", check_rotation),
    Fault("one head too many", NAME, "head < end;", "head <= end;", check_rotation),
    Fault("one head too few", NAME, "head < end;", "head + 1 < end;", check_rotation),
    Fault("a key taken for a query", NAME, "is_query = head < heads", "is_query = head <= heads", check_rotation),
    Fault("no barrier before sums", NAME, "__syncthreads();  // every chunk", "//", check_norm),
    Fault("a sum without its last chunk", NAME, "i < kChunks; ++i) sq", "i < kChunks - 1; ++i) sq", check_norm),
    Fault("a norm without eps", NAME, "/ size + p.norm_eps", "/ size", check_norm),
    Fault(
        "the first chunk's weights",
        NAME,
        "norm_weight + head * kHeadSize + chunk * kChunk",
        "norm_weight + head * kHeadSize",
        check_norm,
    ),
    Fault("turned the other way", NAME, "second ? s : -s", "second ? -s : s", check_rotation),
    Fault(
        "one element too many turned", NAME, "p.rotary_dim - first, 0", "p.rotary_dim + 1 - first, 0", check_rotation
    ),
    Fault("fp8 scaled the wrong way", NAME, "1.0f / scale", "scale", check_fp8),
    Fault("values with the keys' scale", NAME, "values, kv_scale(p, 1", "values, kv_scale(p, 0", check_fp8),
    Fault("fp8 truncated", NAME, "+ 0x7ffffu + ((magnitude >> 20) & 1u)", "", check_fp8),
    Fault("fp8 ties upwards", NAME, "+ 0x7ffffu + ((magnitude >> 20) & 1u)", "+ 0x80000u", check_fp8),
    Fault(
        "heads of the loop share their partners", TOGETHER, "if (first > begin) __syncthreads();", "", check_together
    ),
    Fault("no barrier before the sum", TOGETHER, "__syncthreads();  // every warp", "//", check_together),
    Fault("lanes left out of the sum", TOGETHER, "lane = 16;", "lane = 8;", check_together),
    Fault("a warp left out of the sum", TOGETHER, "warp < kThreads / 32;", "warp < kThreads / 32 - 1;", check_together),
    Fault(
        "chunks of the last heads left out", TOGETHER, "(end - begin) * kChunks)", "kHeads * kChunks)", check_together
    ),
    Fault("the mean of one head", TOGETHER, "squares, (end - begin) * kHeadSize", "squares, kHeadSize", check_together),
    Fault(
        "keys with the queries' sum",
        TOGETHER,
        "heads.at(p, blockIdx.x, begin)",
        "heads.at(p, blockIdx.x, 0)",
        check_together,
    ),
    Fault(
        "heads of the first round alone",
        TOGETHER,
        "first < end; first += kHeads",
        "first <= begin; first += kHeads",
        check_together,
    ),
    Fault("skipped rows written", NAME, "if (slot < 0) return;", "", check_rotation, sanitizer=True),
    Fault("one token too many", NAME, "token = blockIdx.x;", "token = blockIdx.x + 1;", check_rotation, sanitizer=True),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
