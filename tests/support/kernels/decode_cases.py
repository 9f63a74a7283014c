"""Cases of the decode kernel: sequences, pools that hold them in scattered blocks, what kernel and twin say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from support.kernels import twin
from support.kernels.host_build import SANITIZE, HostLauncher, address, aligned_empty

from pagekv.kernels import launch_config as geometry
from pagekv.kernels.decode_plan import arrivals_of_merge, decode_work
from pagekv.kernels.params import DECODE, MERGE, fill
from pagekv.kernels.variants import Variant

Array = npt.NDArray[Any]

# Largest error of a weighted mean of values up to 1 in size: rounding of weights and of the result.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
NOWHERE = 0x7FFFFFFF
"""Entries of a block table past the sequence's end: a kernel that goes there leaves the pool."""


@dataclass(frozen=True)
class Features:
    window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False


PLAIN = Features()


@dataclass(frozen=True)
class Sequences:
    """What decode sees, wherever it is stored: one query row each, and keys and values as stored elements."""

    variant: Variant
    query: Array
    """[S, H, D] of `variant.dtype`."""
    keys: list[Array]
    """Of each sequence [length, G, D] of `variant.kv_dtype`."""
    values: list[Array]
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0

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
    k_scale, v_scale = (0.8, 1.25) if fp8 else (1.0, 1.0)
    query = twin.encode(rng.uniform(-1, 1, (len(lengths), heads, size)), variant.dtype)
    # Dot products of such vectors are around sqrt(size) / 3.
    return Sequences(variant, query, keys, values, logit_size * 3 / np.sqrt(size) / k_scale, k_scale, v_scale)


@dataclass(frozen=True)
class Cache:
    """Sequences stored in blocks of a pool."""

    pool: Array
    """[num_blocks, num_layers, 2, block_size, G, D]; every slot that no sequence has holds NaN."""
    tables: Array
    """[S, W] int32."""
    layer: int

    def unowned(self, context_lens: Array) -> list[Array]:
        """What a decode of this layer has no business with: other blocks, other layers, slots past the end."""
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


def slopes(num_heads: int) -> npt.NDArray[np.float32]:
    return (2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)).astype(np.float32)


def run_decode(
    launcher: HostLauncher,
    sequences: Sequences,
    cache: Cache,
    features: Features = PLAIN,
    *,
    fused: bool = True,
    blocks: int | None = None,
    padding: int = 0,
    plan_window: int | None = None,
    launches: int = 1,
) -> Array:
    """[S, H, D]: the kernel's results, as stored elements. `fused`: merged by the decode kernel, not the merge kernel.

    `blocks`: size of the grid. `padding`: items that do nothing, as in a captured graph. `launches`: over the same
    counters, as the layers of a model do.
    """
    variant, (rows, heads, size) = sequences.variant, sequences.query.shape
    _, layers, _, block_size, kv_heads, _ = cache.pool.shape
    work = decode_work(
        rows=np.arange(rows, dtype=np.int32),
        sequences=np.arange(rows, dtype=np.int32),
        context_lens=sequences.context_lens,
        window=features.window if plan_window is None else plan_window,
    )
    items = np.concatenate([work.items, np.full((padding, 4), -1, np.int32)])
    # Rows apart, as in a fused projection; and nothing may be written between them.
    apart = heads * size + 16
    query = aligned_empty((rows, apart), sequences.query.dtype)
    query[:, : heads * size] = sequences.query.reshape(rows, -1)
    out = aligned_empty((rows, apart), sequences.query.dtype)
    partial_out = aligned_empty((max(work.num_partials, 1), heads, size), np.float32)
    partial_state = aligned_empty((max(work.num_partials, 1), heads, 2), np.float32)
    arrivals = np.zeros((len(work.merges), arrivals_of_merge(heads, kv_heads)), np.int32)
    context_lens, alibi = sequences.context_lens, slopes(heads) if features.alibi else None
    kv_stride = block_size * kv_heads * size
    shape = geometry.decode(variant, len(items), heads, kv_heads)
    params = fill(
        DECODE,
        query=address(query),
        out=address(out),
        pool=address(cache.pool),
        block_tables=address(cache.tables),
        context_lens=address(context_lens),
        items=address(items),
        merges=address(work.merges),
        arrivals=address(arrivals) if fused else 0,
        partial_out=address(partial_out),
        partial_state=address(partial_state),
        alibi_slopes=address(alibi),
        block_stride=layers * 2 * kv_stride,
        kv_stride=kv_stride,
        query_stride=apart,
        out_stride=apart,
        num_items=len(items),
        num_heads=heads,
        num_kv_heads=kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        table_stride=cache.tables.shape[1],
        layer=cache.layer,
        window=features.window,
        scale=sequences.scale,
        soft_cap=features.soft_cap,
        k_scale=sequences.k_scale,
        v_scale=sequences.v_scale,
    )
    grid = (blocks, 1, 1) if blocks else shape.grid
    with launcher.forbidden(*(cache.unowned(context_lens) if SANITIZE else ())):
        for _ in range(launches):
            out[...] = aligned_empty(out.shape, out.dtype)
            launcher.launch("pagekv_decode", variant, grid, shape.threads, shape.shared_bytes, params)
    if not fused and len(work.merges):
        shape = geometry.merge(variant, len(work.merges), heads)
        merge = fill(
            MERGE,
            out=address(out),
            partial_out=address(partial_out),
            partial_state=address(partial_state),
            items=address(work.merges),
            out_stride=apart,
            num_items=len(work.merges),
            num_heads=heads,
        )
        launcher.launch("pagekv_merge", variant, shape.grid, shape.threads, shape.shared_bytes, merge)
    assert not arrivals.any(), "counters are left at zero"
    assert (out[:, heads * size :].view(np.uint8) == 0xFF).all(), "wrote beside its rows"
    return out[:, : heads * size].reshape(rows, heads, size).copy()


def expected(sequences: Sequences, features: Features = PLAIN) -> twin.Float64:
    """[S, H, D] by the twin."""
    variant = sequences.variant
    query = twin.decode(sequences.query, variant.dtype)
    out = np.zeros_like(query)
    for s in range(len(sequences)):
        keys, values = (twin.decode(part[s], variant.kv_dtype) for part in (sequences.keys, sequences.values))
        out[s] = twin.attention(
            query[s : s + 1],
            keys * sequences.k_scale,
            values * sequences.v_scale,
            scale=sequences.scale,
            window=features.window,
            soft_cap=features.soft_cap,
            alibi_slopes=slopes(query.shape[1]) if features.alibi else None,
        )[0]
    return out


def worst_error(sequences: Sequences, result: Array, features: Features = PLAIN) -> float:
    """Largest difference from the twin; NaN counts as infinite."""
    difference = np.abs(twin.decode(result, sequences.variant.dtype) - expected(sequences, features))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
