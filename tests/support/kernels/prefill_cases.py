"""Cases of the prefill kernel: chunks of sequences in scattered blocks, the kernel's result, and the twin's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from support.kernels import twin
from support.kernels.decode_cases import TOLERANCE, Cache, Features, Sequences, random_sequences, slopes, store
from support.kernels.host_build import HostLauncher, address, aligned_empty

from pagekv.kernels import launch_config as geometry
from pagekv.kernels.params import PREFILL, fill
from pagekv.kernels.prefill_plan import prefill_items, prefill_tile
from pagekv.kernels.variants import Variant

Array = npt.NDArray[Any]
PLAIN = Features()

# A chunk behind cached tokens, a single token, a sequence without rows, a whole prompt, one key, no key at all.
COUNTS = [70, 1, 0, 33, 1, 2]
CONTEXTS = [200, 130, 17, 33, 1, 0]


@dataclass(frozen=True)
class Prompts:
    """Tokens with queries, keys and values, wherever they are stored; the last counts[s] of sequence s are computed."""

    sequences: Sequences
    """Keys and values of every visible token; its own queries are not used."""
    queries: list[Array]
    """Of each sequence [length, H, D]: of every token, also of those that are not computed."""
    counts: list[int]

    @property
    def variant(self) -> Variant:
        return self.sequences.variant

    def chunk(self, sequence: int, begin: int, end: int) -> Prompts:
        """Tokens begin to end of one sequence, behind what is in front of them."""
        old = self.sequences
        return Prompts(
            replace(
                old,
                query=old.query[:1],
                keys=[old.keys[sequence][:end]],
                values=[old.values[sequence][:end]],
            ),
            [self.queries[sequence][:end]],
            [end - begin],
        )

    def rows(self) -> list[slice]:
        """Where each sequence's rows are in the packed batch."""
        ends = np.cumsum(self.counts).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def together(parts: Sequence[Prompts]) -> Prompts:
    """One batch of several."""
    sequences = [part.sequences for part in parts]
    merged = replace(
        sequences[0],
        query=np.concatenate([s.query for s in sequences]),
        keys=[keys for s in sequences for keys in s.keys],
        values=[values for s in sequences for values in s.values],
    )
    return Prompts(
        merged, [query for part in parts for query in part.queries], [count for part in parts for count in part.counts]
    )


def random_prompts(
    rng: np.random.Generator,
    variant: Variant,
    counts: list[int],
    contexts: list[int],
    *,
    group: int = 1,
    kv_heads: int = 2,
    shared: int = 0,
    logit_size: float = 2.0,
) -> Prompts:
    """See `random_sequences`; sequence s has `contexts[s]` visible tokens."""
    sequences = random_sequences(
        rng, variant, contexts, group=group, kv_heads=kv_heads, shared=shared, logit_size=logit_size
    )
    heads, size = group * kv_heads, variant.head_size
    queries = [
        twin.encode(rng.uniform(-1, 1, (max(context, count), heads, size)), variant.dtype)
        for context, count in zip(contexts, counts, strict=True)
    ]
    return Prompts(sequences, queries, counts)


def run_prefill(
    launcher: HostLauncher,
    prompts: Prompts,
    cache: Cache,
    features: Features = PLAIN,
    *,
    padding: int = 0,
) -> Array:
    """[T, H, D]: the kernel's results, as stored elements. `padding`: items that do nothing, as in a captured graph."""
    variant, sequences = prompts.variant, prompts.sequences
    _, heads, size = prompts.queries[0].shape
    _, layers, _, block_size, kv_heads, _ = cache.pool.shape
    packed = np.concatenate([q[len(q) - n :] for q, n in zip(prompts.queries, prompts.counts, strict=True)])
    query_start = np.concatenate([[0], np.cumsum(prompts.counts)]).astype(np.int32)
    context_lens, alibi = sequences.context_lens, slopes(heads) if features.alibi else None
    items = prefill_items(
        query_start,
        context_lens,
        np.arange(len(sequences), dtype=np.int32),
        group_size=heads // kv_heads,
        tile=prefill_tile(variant),
        window=features.window,
    )
    items = np.concatenate([items, np.full((padding, 4), -1, np.int32)])
    # Rows apart, as in a fused projection; and nothing may be written between them.
    apart = heads * size + 16
    query = aligned_empty((len(packed), apart), packed.dtype)
    query[:, : heads * size] = packed.reshape(len(packed), heads * size)
    guarded = aligned_empty((len(packed) + 2, apart), packed.dtype)
    out = guarded[: len(packed)]
    kv_stride = block_size * kv_heads * size
    shape = geometry.prefill(variant, len(items), heads, kv_heads)
    params = fill(
        PREFILL,
        query=address(query),
        out=address(out),
        pool=address(cache.pool),
        block_tables=address(cache.tables),
        context_lens=address(context_lens),
        query_start=address(query_start),
        items=address(items),
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
    if len(items):
        unused = np.setdiff1d(np.arange(len(cache.pool)), cache.tables)
        with launcher.forbidden(*(cache.pool[block] for block in unused)):
            launcher.launch("pagekv_prefill", variant, shape.grid, shape.threads, shape.shared_bytes, params)
    assert (out[:, heads * size :].view(np.uint8) == 0xFF).all(), "wrote beside its rows"
    assert (guarded[len(packed) :].view(np.uint8) == 0xFF).all(), "wrote behind its rows"
    return out[:, : heads * size].reshape(packed.shape).copy()


def run_stored(
    launcher: HostLauncher,
    rng: np.random.Generator,
    prompts: Prompts,
    features: Features = PLAIN,
    *,
    block_size: int = 16,
    shared: int = 0,
    padding: int = 0,
) -> Array:
    """`run_prefill` over blocks of this size, scattered at random."""
    cache = store(rng, prompts.sequences, block_size, shared=shared)
    return run_prefill(launcher, prompts, cache, features, padding=padding)


def expected(prompts: Prompts, features: Features = PLAIN) -> twin.Float64:
    """[T, H, D] by the twin."""
    sequences, variant = prompts.sequences, prompts.variant
    parts = []
    for s, count in enumerate(prompts.counts):
        query = twin.decode(prompts.queries[s], variant.dtype)
        keys, values = (twin.decode(part[s], variant.kv_dtype) for part in (sequences.keys, sequences.values))
        parts.append(
            twin.attention(
                query[len(query) - count :],
                keys * sequences.k_scale,
                values * sequences.v_scale,
                scale=sequences.scale,
                window=features.window,
                soft_cap=features.soft_cap,
                alibi_slopes=slopes(query.shape[1]) if features.alibi else None,
            )
        )
    return np.concatenate(parts)


def worst_error(prompts: Prompts, result: Array, features: Features = PLAIN) -> float:
    """Largest difference from the twin; NaN counts as infinite."""
    difference = np.abs(twin.decode(result, prompts.variant.dtype) - expected(prompts, features))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def mixed_batch(variant: Variant, *, group: int = 4, seed: int = 0) -> Prompts:
    return random_prompts(np.random.default_rng(seed), variant, COUNTS, CONTEXTS, group=group)


def check(launcher: HostLauncher, prompts: Prompts, features: Features = PLAIN, *, block_size: int = 16) -> None:
    result = run_stored(launcher, np.random.default_rng(1), prompts, features, block_size=block_size)
    assert worst_error(prompts, result, features) <= TOLERANCE[prompts.variant.dtype]


def same_bits(left: Array, right: Array) -> None:
    np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8))
