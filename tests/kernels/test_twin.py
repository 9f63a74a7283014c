"""The float64 reference of the kernels against torch, which is another implementation of the same definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernels import twin


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_every_code_has_the_value_torch_gives_it(dtype: str) -> None:
    storage = twin.STORAGE[dtype]
    codes = np.arange(1 << 8 * np.dtype(storage).itemsize, dtype=np.uint16).astype(np.uint16)
    stored = codes.astype(np.uint8) if storage is np.uint8 else codes.view(storage)
    signed = stored.view(np.int8 if stored.itemsize == 1 else np.int16)
    expected = torch.from_numpy(signed).view(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(twin.decode(stored, dtype), expected)
    # And back: every value is its own nearest; NaN has several codes.
    finite = ~np.isnan(expected)
    back = twin.encode(expected[finite], dtype)
    np.testing.assert_array_equal(back.view(stored.dtype), stored[finite])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_values_round_as_torch_rounds_them(dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=20000) * 10.0 ** rng.uniform(-6, 2, size=20000)).astype(np.float32)
    codes = np.arange(126 if dtype.startswith("float8") else 30000, dtype=np.uint16)
    stored = [codes.astype(np.uint8) if dtype.startswith("float8") else codes.view(twin.STORAGE[dtype])]
    exact = twin.decode(np.concatenate(stored), dtype)
    middles = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)  # ties, all exact in float32
    values = np.clip(np.concatenate([values, middles, -middles]), -448, 448)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    actual = twin.decode(twin.encode(values, dtype), dtype)
    np.testing.assert_array_equal(actual, expected.double().numpy())


def test_e4m3_saturates() -> None:
    """Where torch makes NaN of what is too large."""
    values = np.array([449, 464, 465, 1e30, np.inf, -np.inf, np.nan])
    assert twin.encode(values, "float8_e4m3fn").tolist() == [0x7E] * 5 + [0xFE, 0x7F]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_attention_is_that_of_torch(num_kv_heads: int) -> None:
    """Causal with an offset, groups of query heads."""
    rng = np.random.default_rng(1)
    query, keys, values = (rng.normal(size=(n, h, 16)) for n, h in ((5, 8), (12, num_kv_heads), (12, num_kv_heads)))
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    q, k, v = (torch.from_numpy(array).transpose(0, 1)[None] for array in (query, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    actual = twin.attention(query, keys, values, scale=0.3)
    np.testing.assert_allclose(actual, expected[0].transpose(0, 1).numpy(), atol=1e-12)


def test_features_do_what_their_formulas_say() -> None:
    """Window and soft cap, for one query written out."""
    rng = np.random.default_rng(1)
    query, keys, values = rng.normal(size=(1, 1, 4)), rng.normal(size=(6, 1, 4)), rng.normal(size=(6, 1, 4))
    logits = [2 * np.tanh(0.5 * query[0, 0] @ keys[k, 0] / 2) for k in (3, 4, 5)]
    weights = np.exp(logits) / np.exp(logits).sum()
    expected = sum(weight * values[k, 0] for weight, k in zip(weights, (3, 4, 5), strict=True))
    actual = twin.attention(query, keys, values, scale=0.5, window=3, soft_cap=2)
    np.testing.assert_allclose(actual[0, 0], expected, atol=1e-12)


def test_a_row_without_keys_is_zero() -> None:
    empty = np.zeros((0, 1, 4))
    assert not twin.attention(np.ones((2, 1, 4)), empty, empty, scale=1).any()
    # Two rows, one key: the first of them stands before it.
    out = twin.attention(np.ones((2, 1, 4)), np.ones((1, 1, 4)), np.ones((1, 1, 4)), scale=1)
    assert out[:, 0, 0].tolist() == [0, 1]


def test_rotation_is_multiplication_of_complex_numbers() -> None:
    rng = np.random.default_rng(1)
    heads, positions = rng.normal(size=(3, 2, 10)), np.array([4, 0, 2])
    angles = rng.uniform(0, 6, size=(5, 3))
    rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    rotated = twin.rotate(heads, rope, positions)
    turned = (heads[..., :3] + 1j * heads[..., 3:6]) * np.exp(1j * angles[positions])[:, None]
    np.testing.assert_allclose(rotated[..., :3] + 1j * rotated[..., 3:6], turned, atol=1e-12)
    np.testing.assert_array_equal(rotated[..., 6:], heads[..., 6:])


def test_written_keys_are_read_back_through_a_block_table() -> None:
    """The reference itself: shuffled blocks, a skipped row."""
    rng = np.random.default_rng(1)
    pool = np.full((5, 2, 2, 4, 3, 8), np.nan, np.float32)
    table = np.array([3, 0, 4])
    positions = np.arange(10)
    slots = table[positions // 4] * 4 + positions % 4
    key, value = rng.normal(size=(2, 10, 3, 8)).astype(np.float32).astype(np.float64)
    twin.write(pool, 1, key[:9], value[:9], slots[:9], kv_dtype="float32")
    twin.write(pool, 1, key[9:], value[9:], np.array([-1]), kv_dtype="float32")
    keys, values = twin.gather(pool, 1, table, 9, kv_dtype="float32")
    np.testing.assert_array_equal(keys, key[:9])
    np.testing.assert_array_equal(values, value[:9])
    assert np.isnan(pool[:, 0]).all()
    assert np.isnan(pool[4, 1, :, 1:]).all()
