"""Chunks of stored sequences and launches of the prefill kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from support.kernels import stored_sequences, twin
from support.kernels.host_build import HostLauncher, address
from support.kernels.stored_sequences import (
    PLAIN,
    TOLERANCE,
    Array,
    Cache,
    Features,
    Rows,
    Sequences,
    attention_values,
    random_sequences,
    store,
)

from pagekv.kernels import launch_config
from pagekv.kernels.params import PREFILL, fill
from pagekv.kernels.prefill_plan import prefill_items, prefill_tile
from pagekv.kernels.variants import Variant

# A chunk behind cached tokens, a single token, a sequence without rows, a whole prompt, one key, no key at all.
COUNTS = [70, 1, 0, 33, 1, 2]
CONTEXTS = [200, 130, 17, 33, 1, 0]


@dataclass(frozen=True)
class Prompts:
    """Tokens with queries, keys and values, wherever they are stored; the last counts[s] of sequence s are computed."""

    sequences: Sequences
    """Keys and values of every visible token; the queries in it are not used."""
    queries: list[Array]
    """Of each sequence [length, H, D]: of every token, also of those that are not computed."""
    counts: list[int]

    @property
    def variant(self) -> Variant:
        return self.sequences.variant

    def chunk(self, sequence: int, begin: int, end: int) -> Prompts:
        """Tokens begin to end of one sequence, behind the tokens before them."""
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

    def computed(self) -> list[Array]:
        """Of each sequence [count, H, D]: the queries that are computed."""
        return [query[len(query) - n :] for query, n in zip(self.queries, self.counts, strict=True)]

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
    heads, kv_heads = prompts.queries[0].shape[1], cache.pool.shape[4]
    query_start = np.concatenate([[0], np.cumsum(prompts.counts)]).astype(np.int32)
    context_lens = sequences.context_lens
    items = prefill_items(
        query_start,
        context_lens,
        np.arange(len(sequences), dtype=np.int32),
        group_size=heads // kv_heads,
        tile=prefill_tile(variant),
        window=features.window,
    )
    items = np.concatenate([items, np.full((padding, 4), -1, np.int32)])
    rows = Rows.of(np.concatenate(prompts.computed()))
    shape = launch_config.prefill(variant, len(items), kv_heads)
    params = fill(
        PREFILL,
        query_start=address(query_start),
        items=address(items),
        num_items=len(items),
        **attention_values(sequences, cache, rows, context_lens, features),
    )
    if len(items):
        unused = np.setdiff1d(np.arange(len(cache.pool)), cache.tables)
        with launcher.forbidden(*(cache.pool[block] for block in unused)):
            launcher.launch("pagekv_prefill", variant, shape, params)
    return rows.result()


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


def worst_error(prompts: Prompts, result: Array, features: Features = PLAIN) -> float:
    """Largest difference of a prefill's result from the twin; NaN counts as infinite."""
    wanted = stored_sequences.expected(prompts.sequences, prompts.computed(), features)
    return stored_sequences.worst_difference(result, prompts.variant.dtype, wanted)


def mixed_batch(variant: Variant, *, group: int = 4, seed: int = 0) -> Prompts:
    return random_prompts(np.random.default_rng(seed), variant, COUNTS, CONTEXTS, group=group)


def check(launcher: HostLauncher, prompts: Prompts, features: Features = PLAIN, *, block_size: int = 16) -> None:
    result = run_stored(launcher, np.random.default_rng(1), prompts, features, block_size=block_size)
    assert worst_error(prompts, result, features) <= TOLERANCE[prompts.variant.dtype]
