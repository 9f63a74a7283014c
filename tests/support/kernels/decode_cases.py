"""Launches of the decode and the merge kernel over stored sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.kernels import stored_sequences
from support.kernels.host_build import SANITIZE, HostLauncher, address, aligned_empty
from support.kernels.stored_sequences import PLAIN, Array, Cache, Features, Rows, Sequences, attention_values

from pagekv.kernels import launch_config
from pagekv.kernels.decode_plan import decode_tile, decode_work, merge_counters
from pagekv.kernels.params import DECODE, MERGE, fill


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
    share: bool = False,
) -> Array:
    """[S, H, D]: the kernel's results, as stored elements. `fused`: merged by the decode kernel, not the merge kernel.

    `blocks`: size of the grid. `padding`: items that do nothing, as in a captured graph. `launches`: over the same
    counters, as the layers of a model do. `share`: splits of the same blocks are read once for several rows.
    """
    variant, (count, heads, size) = sequences.variant, sequences.query.shape
    kv_heads = cache.pool.shape[4]
    work = decode_work(
        rows=np.arange(count, dtype=np.int32),
        sequences=np.arange(count, dtype=np.int32),
        context_lens=sequences.context_lens,
        window=features.window if plan_window is None else plan_window,
        tables=cache.tables if share else None,
        block_size=cache.pool.shape[3],
        most_members=decode_tile(variant, wide=True).rows // (heads // kv_heads),
        all_wide=heads // kv_heads > decode_tile(variant).rows and variant.dtype != "float32",
    )
    rows, context_lens = Rows.of(sequences.query), sequences.context_lens
    partial_out = aligned_empty((max(work.num_partials, 1), heads, size), np.float32)
    partial_state = aligned_empty((max(work.num_partials, 1), heads, 2), np.float32)
    counters = np.zeros((len(work.merges), merge_counters(heads, kv_heads)), np.int32)
    starts = []
    for kernel, wide, found in (("pagekv_decode_wide", True, work.wide_items), ("pagekv_decode", False, work.items)):
        if not len(found):
            continue
        items = np.concatenate([found, np.full((padding, 4), -1, np.int32)])
        contexts = np.concatenate([work.item_contexts, np.full(padding, -1, np.int32)])
        dealt = np.array([0, len(found)], np.int32)
        shape = launch_config.decode(variant, len(items), heads, kv_heads, wide=wide)
        params = fill(
            DECODE,
            items=address(items),
            item_contexts=0 if wide else address(contexts),
            dealt=address(dealt),
            members=address(work.members) if wide else 0,
            merges=address(work.merges),
            merge_counters=address(counters) if fused else 0,
            partial_out=address(partial_out),
            partial_state=address(partial_state),
            num_items=len(items),
            **attention_values(sequences, cache, rows, features),
        )
        if blocks:
            shape = replace(shape, grid=(blocks, 1, 1), dealt=False)
        starts.append((kernel, shape, params, dealt, (items, contexts)))
    with launcher.forbidden(*(cache.unowned(context_lens) if SANITIZE else ())):
        for _ in range(launches):
            rows.clear()
            for kernel, shape, params, dealt, _held in starts:
                launcher.launch(kernel, variant, shape, params)
                assert not dealt[0], "the next launch deals from the first item on"
    if not fused and len(work.merges):
        shape = launch_config.merge(variant, len(work.merges), heads)
        merge = fill(
            MERGE,
            out=address(rows.out),
            partial_out=address(partial_out),
            partial_state=address(partial_state),
            sinks=address(features.sinks_of(heads)),
            items=address(work.merges),
            out_stride=rows.out.shape[1],
            num_heads=heads,
        )
        launcher.launch("pagekv_merge", variant, shape, merge)
    assert not counters.any(), "counters are left at zero"
    return rows.result()


def worst_error(sequences: Sequences, result: Array, features: Features = PLAIN) -> float:
    """Largest difference of a decode's result from the twin; NaN counts as infinite."""
    wanted = stored_sequences.expected(sequences, [query[None] for query in sequences.query], features)
    return stored_sequences.worst_difference(result, sequences.variant.dtype, wanted)
