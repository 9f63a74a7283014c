"""Sequences with keys and values in scattered blocks of a pool, and the twin's attention over them: the cases of the
decode and the prefill kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from support.kernels import twin
from support.kernels.host_build import address, aligned_empty

from pagekv.kernels.variants import Variant

Array = npt.NDArray[Any]

# Largest error of a weighted mean of values up to 1 in size: rounding of weights and of the result.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
NOWHERE = 0x7FFFFFFF
"""Entry of a block table past the sequence's end: a kernel that follows it leaves the pool."""


@dataclass(frozen=True)
class Features:
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    def sinks_of(self, heads: int) -> Array | None:
        """[H] float32: a sink of each head, some below and some above usual logits; None without."""
        return _sinks(heads) if self.sinks else None


@cache
def _sinks(heads: int) -> Array:
    return np.linspace(-2, 5, heads).astype(np.float32)


PLAIN = Features()


@dataclass(frozen=True)
class Sequences:
    """Keys and values as stored elements, wherever they are stored, and one query row each."""

    variant: Variant
    query: Array
    """[S, H, D] of `variant.dtype`."""
    keys: list[Array]
    """Of each sequence [length, G, D] of `variant.kv_dtype`."""
    values: list[Array]
    scale: float
    kv_scales: Array | None = None
    """[2, G] float32: factors of stored keys, and of stored values, of each KV head; None: 1."""

    @property
    def exact(self) -> list[tuple[Array, Array]]:
        """Of each sequence, keys and values in float64."""
        factors = np.ones((2, 1, 1)) if self.kv_scales is None else self.kv_scales.astype(np.float64)[:, :, None]
        stored = zip(self.keys, self.values, strict=True)
        return [
            (
                twin.decode(keys, self.variant.kv_dtype) * factors[0],
                twin.decode(values, self.variant.kv_dtype) * factors[1],
            )
            for keys, values in stored
        ]

    @property
    def context_lens(self) -> Array:
        return np.array([len(keys) for keys in self.keys], np.int32)

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, order: list[int]) -> Sequences:
        """The same sequences, some of them, in another order."""
        return replace(
            self, query=self.query[order], keys=[self.keys[i] for i in order], values=[self.values[i] for i in order]
        )


def random_sequences(
    rng: np.random.Generator,
    variant: Variant,
    lengths: list[int],
    *,
    group: int = 1,
    kv_heads: int = 2,
    shared: int = 0,
    logit_size: float = 2.0,
) -> Sequences:
    """Values are up to 1 in size and logits around `logit_size`; all sequences share their first `shared` tokens."""
    heads, size = group * kv_heads, variant.head_size

    def stored(length: int) -> Array:
        return twin.encode(rng.uniform(-1, 1, (length, kv_heads, size)), variant.kv_dtype)

    prefix = stored(shared), stored(shared)
    keys, values = (
        [np.concatenate([part[:length], stored(max(length - shared, 0))]) for length in lengths] for part in prefix
    )
    fp8 = variant.kv_element_bytes == 1
    scales = np.stack([np.linspace(0.8, 0.7, kv_heads), np.linspace(1.25, 1.1, kv_heads)]).astype(np.float32)
    query = twin.encode(rng.uniform(-1, 1, (len(lengths), heads, size)), variant.dtype)
    # Dot products of such vectors are around sqrt(size) / 3.
    return Sequences(variant, query, keys, values, logit_size * 3 / np.sqrt(size), scales if fp8 else None)


@dataclass(frozen=True)
class Cache:
    """Sequences stored in blocks of a pool."""

    pool: Array
    """[num_blocks, num_layers, 2, block_size, G, D]; every slot without a token holds NaN."""
    tables: Array
    """[S, W] int32."""
    layer: int

    def unowned(self, context_lens: Array) -> list[Array]:
        """Memory that a decode of this layer must not read: other blocks, other layers, slots past the end."""
        block_size = self.pool.shape[3]
        used = np.zeros((len(self.pool), block_size), bool)
        for table, length in zip(self.tables, context_lens, strict=True):
            positions = np.arange(length)
            used[table[positions // block_size], positions % block_size] = True
        parts = []
        for block, slots in zip(self.pool, used.sum(axis=1), strict=True):
            for layer, part in enumerate(block):
                parts += [side[slots if layer == self.layer else 0 :] for side in part]
        return [part for part in parts if part.size]


def store(
    rng: np.random.Generator, sequences: Sequences, block_size: int, *, shared: int = 0, layers: int = 2, layer: int = 1
) -> Cache:
    """Scatters the sequences over blocks in random order; full blocks of the first `shared` tokens exist once."""
    kv_heads, size = sequences.keys[0].shape[1:]
    lengths = sequences.context_lens
    blocks = -(-lengths // block_size)
    width = int(blocks.max(initial=1)) + 1
    ids = rng.permutation(int(blocks.sum()) + 3)  # some belong to nobody
    tables = np.full((len(sequences), width), NOWHERE, np.int32)
    pool = aligned_empty(
        (len(ids), layers, 2, block_size, kv_heads, size), twin.STORAGE[sequences.variant.kv_dtype]
    )  # 0xff bytes are NaN in every type
    taken, longest = 0, int(np.argmax(lengths)) if len(lengths) else 0
    for s in sorted(range(len(sequences)), key=lambda s: s != longest):
        common = min(shared, int(lengths[s])) // block_size if s != longest else 0
        tables[s, :common] = tables[longest, :common]
        tables[s, common : blocks[s]] = ids[taken : taken + blocks[s] - common]
        taken += int(blocks[s]) - common
        positions = np.arange(lengths[s])
        at = tables[s, positions // block_size], layer, slice(None), positions % block_size
        pool[at] = np.stack([sequences.keys[s], sequences.values[s]], axis=1)
    return Cache(pool, tables, layer)


@dataclass(frozen=True)
class Rows:
    """Query and output rows of a launch, apart as in a fused projection, with memory between and behind them."""

    query: Array
    """[T, H * D + 16]."""
    out: Array
    """[T + 2, H * D + 16]."""
    shape: tuple[int, ...]
    """[T, H, D] of the packed queries."""

    @classmethod
    def of(cls, packed: Array) -> Rows:
        """Rows with these queries [T, H, D]."""
        count, heads, size = packed.shape
        query = aligned_empty((count, heads * size + 16), packed.dtype)
        query[:, : heads * size] = packed.reshape(count, heads * size)
        return cls(query, aligned_empty((count + 2, heads * size + 16), packed.dtype), packed.shape)

    def clear(self) -> None:
        """Fills the output with 0xff bytes."""
        self.out.view(np.uint8)[...] = 0xFF

    def result(self) -> Array:
        """[T, H, D]: a copy of the output. Nothing may have been written beside or behind it."""
        count, heads, size = self.shape
        assert (self.out[:count, heads * size :].view(np.uint8) == 0xFF).all(), "wrote beside its rows"
        assert (self.out[count:].view(np.uint8) == 0xFF).all(), "wrote behind its rows"
        return self.out[:count, : heads * size].reshape(self.shape).copy()


def attention_values(sequences: Sequences, cache: Cache, rows: Rows, features: Features) -> dict[str, float]:
    """The fields that the parameters of decode and prefill have in common."""
    _, layers, _, block_size, kv_heads, size = cache.pool.shape
    kv_stride = block_size * kv_heads * size
    return {
        "query": address(rows.query),
        "out": address(rows.out),
        "pool": address(cache.pool),
        "block_tables": address(cache.tables),
        "block_stride": layers * 2 * kv_stride,
        "kv_stride": kv_stride,
        "query_stride": rows.query.shape[1],
        "out_stride": rows.out.shape[1],
        "num_heads": rows.shape[1],
        "num_kv_heads": kv_heads,
        "block_size_log2": block_size.bit_length() - 1,
        "table_stride": cache.tables.shape[1],
        "layer": cache.layer,
        "window": features.window,
        "scale": sequences.scale,
        "soft_cap": features.soft_cap,
        "sinks": address(features.sinks_of(rows.shape[1])),
        "kv_scales": address(sequences.kv_scales),
    }


def expected(sequences: Sequences, queries: list[Array], features: Features = PLAIN) -> twin.Float64:
    """[T, H, D] by the twin; `queries`: of each sequence [n, H, D], its last n tokens."""
    parts = []
    for query, (keys, values) in zip(queries, sequences.exact, strict=True):
        parts.append(
            twin.attention(
                twin.decode(query, sequences.variant.dtype),
                keys,
                values,
                scale=sequences.scale,
                window=features.window,
                soft_cap=features.soft_cap,
                sinks=features.sinks_of(query.shape[1]),
            )
        )
    return np.concatenate(parts)


def worst_difference(result: Array, dtype: str, wanted: twin.Float64) -> float:
    """Largest difference of stored elements from the twin's values; NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(twin.decode(result, dtype) - wanted), nan=np.inf).max(initial=0.0))


def same_bits(left: Array, right: Array) -> None:
    np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8))
