"""Chunks of stored sequences, and launches of the prefill kernel and the merge over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.kernels import stored_sequences, twin
from support.kernels.host_build import HostLauncher, address, aligned_empty
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

from pagekv.kernels.attention_launch import launch_attention
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.prefill_plan import prefill_tile, prefill_work
from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRule
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
    rule: SplitRule = SPLIT_RULE,
    plan_window: int | None = None,
    wgmma: bool = False,
) -> Array:
    """[T, H, D]: the kernels' results, as stored elements. `padding`: items that do nothing, as in a captured graph.

    `rule`: of splits. `plan_window`: the widest of any layer, where that is another one than this layer's.
    `wgmma`: by the kernel of warpgroups.
    """
    variant, sequences = prompts.variant, prompts.sequences
    heads, kv_heads = prompts.queries[0].shape[1], cache.pool.shape[4]
    query_start = np.concatenate([[0], np.cumsum(prompts.counts)]).astype(np.int32)
    context_lens = sequences.context_lens
    work = prefill_work(
        query_start,
        context_lens,
        np.arange(len(sequences), dtype=np.int32),
        group_size=heads // kv_heads,
        tile=prefill_tile(variant),
        window=features.window if plan_window is None else plan_window,
        rule=rule,
    )
    items = np.concatenate([work.items, np.full((padding, 4), -1, np.int32)])
    rows = Rows.of(np.concatenate(prompts.computed()))
    scratch = aligned_empty((work.num_partials, heads, variant.head_size + 2), np.float32)  # NaN
    at = {
        "query_start": address(query_start),
        "context_lens": address(context_lens),
        "prefill_items": address(items),
        "split_items": address(work.split_items),
        "row_merges": address(work.merges),
    }
    plan = AttentionPlan(
        num_rows=int(query_start[-1]),
        table_stride=cache.tables.shape[1],
        num_decode_items=0,
        num_wide_items=0,
        num_merge_items=0,
        num_prefill_items=len(items),
        num_split_items=len(work.split_items),
        num_partials=work.num_partials,
        fused_merges=True,
        at=at,
        scratch=address(scratch),
    )
    unused = np.setdiff1d(np.arange(len(cache.pool)), cache.tables)
    with launcher.forbidden(*(cache.pool[block] for block in unused)):
        launch_attention(
            launcher,
            variant,
            plan,
            attention_values(sequences, cache, rows, features),
            split=rule.splits(features.window),
            wgmma=wgmma,
        )
    return rows.result()


def run_stored(
    launcher: HostLauncher,
    rng: np.random.Generator,
    prompts: Prompts,
    features: Features = PLAIN,
    *,
    block_size: int = 16,
    shared: int = 0,
    **how: Any,
) -> Array:
    """`run_prefill` over blocks of this size, scattered at random; `how`: its further arguments."""
    cache = store(rng, prompts.sequences, block_size, shared=shared)
    return run_prefill(launcher, prompts, cache, features, **how)


def worst_error(prompts: Prompts, result: Array, features: Features = PLAIN) -> float:
    """Largest difference of a prefill's result from the twin; NaN counts as infinite."""
    wanted = stored_sequences.expected(prompts.sequences, prompts.computed(), features)
    return stored_sequences.worst_difference(result, prompts.variant.dtype, wanted)


def mixed_batch(variant: Variant, *, group: int = 4, seed: int = 0) -> Prompts:
    return random_prompts(np.random.default_rng(seed), variant, COUNTS, CONTEXTS, group=group)


def check(
    launcher: HostLauncher, prompts: Prompts, features: Features = PLAIN, *, block_size: int = 16, **how: Any
) -> None:
    result = run_stored(launcher, np.random.default_rng(1), prompts, features, block_size=block_size, **how)
    assert worst_error(prompts, result, features) <= TOLERANCE[prompts.variant.dtype]
