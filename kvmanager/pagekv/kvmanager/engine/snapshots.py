"""Snapshots of pools, scheduler and live requests, taken between two steps; behind `EngineQueries`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.views import (
    BlockDetail,
    BlockMap,
    BlockView,
    EngineStats,
    RequestView,
    SequenceView,
)
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus

# Bounds of a block's detail: blocks of its chain, and requests that hold it.
MAX_CHAIN = 256
MAX_HOLDERS_NAMED = 20


def collect_stats(state: EngineState) -> EngineStats:
    """A snapshot of every counter and gauge. Raises Unavailable before the first attachment."""
    scheduler, cache = state.serving(), state.cache
    pool, host, counters, prompts = scheduler.pool, scheduler.host, scheduler.counters, cache.counters
    return EngineStats(
        **asdict(state.totals),
        **asdict(prompts),
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_free_blocks=pool.num_cached_free,
        active_blocks=pool.num_active,
        kv_usage=pool.num_active / pool.num_blocks,
        utilization=utilization(scheduler),
        running_sequences=len(scheduler.running),
        waiting_sequences=scheduler.num_waiting,
        prompt_tokens_total=counters.prompt_tokens,
        cached_tokens_total=counters.cached_tokens,
        prefix_hit_rate=_share(counters.cached_tokens, counters.prompt_tokens),
        generated_tokens_total=counters.generated_tokens,
        evicted_blocks_total=pool.evictions,
        preemptions_total=counters.preemptions,
        executor_restarts_total=max(0, state.epochs - 1),
        hash_alarms_total=pool.hash_alarms + host.hash_alarms,
        executor_attached=state.attached,
        published_blocks=pool.num_published,
        pinned_blocks=cache.pins.num_blocks,
        pins=len(cache.pins),
        watchers=cache.log.num_watches,
        block_hit_rate=_share(prompts.cached_blocks_total, prompts.prompt_blocks_total),
        num_host_blocks=host.num_blocks,
        host_cached_blocks=host.num_cached,
        host_held_blocks=host.num_held,
        swap_preemptions_total=counters.swap_preemptions,
        swapped_out_blocks_total=counters.swapped_out,
        swapped_in_blocks_total=counters.swapped_in,
        written_back_blocks_total=counters.written_back,
        host_evicted_blocks_total=host.evictions,
        unread_sequences=state.live.num_unread,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def utilization(scheduler: Scheduler) -> float:
    """Tokens with keys and values in held blocks / slots of held blocks, 0 to 1; 1 when nothing is held.

    Only blocks that their sequence has not filled yet can have empty slots, and each of those has one holder.
    """
    size = scheduler.pool.block_size
    slots = scheduler.pool.num_active * size
    empty = sum(len(sequence.block_table) * size - sequence.num_computed for sequence in scheduler.running)
    return 1.0 - empty / slots if slots else 1.0


def sequence_views(request: LiveRequest, block_size: int) -> list[SequenceView]:
    """The block tables of a live request."""
    return [
        SequenceView(
            index=sequence.index,
            state="running" if sequence.state is SeqStatus.DRAINING else sequence.state.value,
            num_tokens=sequence.num_tokens,
            computed_tokens=sequence.num_computed,
            block_ids=list(sequence.block_table),
            block_hashes=sequence.digests[: min(len(sequence.block_table), sequence.num_computed // block_size)],
        )
        for sequence in request.sequences
        if sequence.state is not SeqStatus.FINISHED
    ]


def request_views(requests: Sequence[LiveRequest], limit: int) -> list[RequestView]:
    """Up to `limit` of these requests, those that run first."""
    running = [request for request in requests if any(sequence.block_table for sequence in request.sequences)]
    views = [_request_view(request, "running") for request in running[:limit]]
    if len(views) < limit:
        known = {id(request) for request in running}
        waiting = [request for request in requests if id(request) not in known]
        views += [_request_view(request, "waiting") for request in waiting[: limit - len(views)]]
    return views


def _request_view(request: LiveRequest, state: str) -> RequestView:
    sequences, first = request.sequences, request.sequences[0]
    return RequestView(
        request_id=request.command.request_id,
        state=state,
        priority=request.command.priority,
        num_sequences=len(sequences),
        prompt_tokens=first.num_prompt,
        cached_tokens=first.cached_tokens or 0,
        computed_tokens=first.num_computed,
        generated_tokens=sum(sequence.num_output for sequence in sequences),
        max_total_tokens=first.max_total,
        num_blocks=sum(len(sequence.block_table) for sequence in sequences),
        preemptions=sum(sequence.preemptions for sequence in sequences),
    )


def block_views(cache: CacheAdmin, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
    """As `EngineQueries.list_blocks`."""
    # Vector operations: the engine loop waits meanwhile, and a pool may have millions of blocks.
    pool, pins = cache.pool, cache.pins.holders[start:]
    ref_counts, published = pool.ref_counts[start:], pool.table.published[start:]
    if state is None:
        wanted = np.ones(len(ref_counts), np.bool_)
    elif state == "active":
        wanted = ref_counts > pins
    elif state == "pinned":
        wanted = (ref_counts == pins) & (pins > 0)
    else:
        wanted = (ref_counts == 0) & (published == (state == "cached"))
    blocks: list[int] = (start + np.flatnonzero(wanted)[: limit + 1]).tolist()
    return [_block_view(cache, block) for block in blocks[:limit]], blocks[limit] if len(blocks) > limit else None


def _block_view(cache: CacheAdmin, block: int) -> BlockView:
    table = cache.pool.table
    return BlockView(
        block,
        cache.pool.ref_count(block),
        table.digest(block) or b"",
        table.parent(block) or b"",
        int(cache.pins.holders[block]),
    )


def block_map(state: EngineState) -> BlockMap:
    """Every block of both pools; only `host_keyed` is a copy."""
    scheduler, cache = state.serving(), state.cache
    pool, host = scheduler.pool, scheduler.host
    return BlockMap(
        epoch=state.epochs,
        step=state.totals.steps_total,
        ref_counts=pool.ref_counts,
        pins=cache.pins.holders,
        published=pool.table.published,
        evictions=pool.evictions,
        host_ref_counts=host.ref_counts,
        host_keyed=host.keyed_blocks(),
    )


def block_detail(state: EngineState, block: int) -> BlockDetail:
    """A device block. Raises InvalidRequest."""
    table = state.cache.pool.table
    _check_block_id(block, state.cache.pool.num_blocks)
    chain, complete = _chain(table, block)
    return BlockDetail(
        block=_block_view(state.cache, block),
        cached_s=table.age_s(block),
        token_ids=table.token_ids(block) if table.published[block] else None,
        chain=chain,
        chain_complete=complete,
        requests=_holders(state.live, block),
    )


def host_block_view(host: HostPool, block: int) -> BlockView:
    """A host block. Raises InvalidRequest."""
    _check_block_id(block, host.num_blocks)
    return BlockView(block, int(host.ref_counts[block]), host.key(block) or b"")


def _check_block_id(block: int, num_blocks: int) -> None:
    if block >= num_blocks:
        raise InvalidRequest("block_id", f"must be from 0 to {num_blocks - 1} (the pool), got {block}")


def _chain(table: PrefixTable, block: int) -> tuple[list[int], bool]:
    """The blocks before a block, parent first, and whether the last of them begins a prompt."""
    chain: list[int] = []
    while len(chain) < MAX_CHAIN:
        parent = table.parent(block)
        before = table.lookup(parent) if parent is not None else None
        if before is None:
            return chain, parent is not None
        chain.append(before)
        block = before
    return chain, False


def _holders(live: LiveRequests, block: int) -> list[str]:
    """Ids of requests with a sequence that holds the block, by arrival."""
    found: list[str] = []
    for request in live.all():
        if any((sequence.blocks() == block).any() for sequence in request.sequences):
            found.append(request.command.request_id)
            if len(found) == MAX_HOLDERS_NAMED:
                break
    return found
