"""The computations of the kernels in float64 NumPy, written to be read: the reference of the kernels' tests.

Arrays of a storage type hold bits where NumPy has no such type: bfloat16 as uint16, float8_e4m3fn as uint8.
T: rows of a step, S: sequences, H: query heads, G: KV heads, D: head size.
Pool: [num_blocks, num_layers, 2, block_size, G, D].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

STORAGE: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
}


# --- storage types


def _e4m3_values() -> Float64:
    """The value of each of the 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude)


E4M3_VALUES = _e4m3_values()


def decode(stored: Array, dtype: str) -> Float64:
    """The values of stored elements, exactly."""
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):  # signalling NaN
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e4m3fn":
        return E4M3_VALUES[stored]
    return stored.astype(np.float64)


def encode(values: npt.ArrayLike, dtype: str) -> Array:
    """Values rounded to the nearest stored element, ties to even; e4m3 saturates at +-448."""
    exact = np.asarray(values, np.float64)
    if dtype == "bfloat16":
        # Eight bits of mantissa, fewer below the smallest exponent: then it is an exact float32 with 16 spare bits.
        _, exponent = np.frexp(exact)
        unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = np.where(np.isfinite(exact), np.rint(exact / unit) * unit, exact).astype(np.float32)
        return (rounded.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float8_e4m3fn":
        positive = E4M3_VALUES[:0x7F]
        magnitude = np.minimum(np.abs(exact), 448.0)
        above = np.clip(np.searchsorted(positive, magnitude), 1, 0x7E)
        below = above - 1
        to_above, to_below = positive[above] - magnitude, magnitude - positive[below]
        even = np.where(above % 2 == 0, above, below)
        code = np.where(to_above < to_below, above, np.where(to_below < to_above, below, even))
        code = np.where(np.isnan(exact), 0x7F, code)
        return np.where(np.signbit(exact), code | 0x80, code).astype(np.uint8)
    with np.errstate(over="ignore"):
        return exact.astype(STORAGE[dtype])


# --- cache write


def norm(heads: Float64, weight: Array, eps: float) -> Float64:
    """RMSNorm of each head of `heads` [T, any, D]; `weight` [any, D]."""
    normed: Float64 = heads / np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


def rotate(heads: Float64, rope: Array, positions: Array) -> Float64:
    """Rotary embedding of `heads` [T, any, D].

    `rope`: [positions, rotary_dim], cosines then sines; the first rotary_dim elements of a head are rotated, in pairs
    (i, i + rotary_dim / 2).
    """
    half = rope.shape[1] // 2
    cosine, sine = np.split(rope[positions].astype(np.float64)[:, None, :], 2, axis=2)
    first, second = heads[:, :, :half], heads[:, :, half : 2 * half]
    rotated = heads.copy()
    rotated[:, :, :half] = first * cosine - second * sine
    rotated[:, :, half : 2 * half] = second * cosine + first * sine
    return rotated


def write(
    pool: Array,
    layer: int,
    key: Float64,
    value: Float64,
    slots: Array,
    *,
    kv_dtype: str,
) -> None:
    """Stores `key` and `value` [T, G, D] in slots (block * block_size + offset, negative: nowhere) of one layer."""
    block_size = pool.shape[3]
    kept = np.flatnonzero(slots >= 0)
    blocks, offsets = np.divmod(slots[kept], block_size)
    pool[blocks, layer, 0, offsets] = encode(key[kept], kv_dtype)
    pool[blocks, layer, 1, offsets] = encode(value[kept], kv_dtype)


# --- attention


def attention(
    query: Float64,
    keys: Float64,
    values: Float64,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Float64:
    """Attention of one sequence: `query` [n, H, D] are its last n tokens, `keys` and `values` [k, G, D] all of them.

    The query at position q sees keys 0..q, or (q - window, q]. Logits are scaled, then capped (cap * tanh(x / cap)). A
    row that sees no key is zero. `sinks` [H]: a logit of each head that takes part in the softmax and has no value.
    """
    (num_queries, num_heads, _), (num_keys, num_kv_heads, _) = query.shape, keys.shape
    per_head = num_heads // num_kv_heads
    keys, values = (np.repeat(array, per_head, axis=1) for array in (keys, values))
    # Rows in front of the first key (a context shorter than the rows) have negative positions and see nothing.
    q = np.arange(num_keys - num_queries, num_keys)[:, None]
    k = np.arange(num_keys)[None, :]
    logits = scale * np.einsum("qhd,khd->hqk", query, keys)
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    visible = (k <= q) & ((k > q - window) if window else True)
    logits = np.where(visible, logits, -np.inf)
    beside = np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    logits = np.concatenate([logits, np.broadcast_to(beside[:, None, None], (*logits.shape[:2], 1))], axis=2)
    top = logits.max(axis=2, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=2, keepdims=True)
    out: Float64 = np.einsum("hqk,khd->qhd", (weights / np.where(total > 0, total, 1))[:, :, :-1], values)
    return out


def gather(
    pool: Array,
    layer: int,
    block_table: Array,
    length: int,
    *,
    kv_dtype: str,
) -> tuple[Float64, Float64]:
    """A sequence's keys and values [length, G, D], through its block table."""
    block_size = pool.shape[3]
    positions = np.arange(length)
    stored = pool[block_table[positions // block_size], layer, :, positions % block_size]
    return decode(stored[:, 0], kv_dtype), decode(stored[:, 1], kv_dtype)
