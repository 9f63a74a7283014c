"""Read-only views of pool and scheduler for the cache service; each call is a snapshot between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.views import BlockView, EngineStats, RequestView, SequenceView
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import StepResult


@dataclass(slots=True)
class EngineTotals:
    """Cumulative since the manager started; names and units as in GetStatsResponse."""

    steps: int = 0
    computed_tokens: int = 0
    busy_us: int = 0
    idle_us: int = 0
    requests: int = 0
    aborted: int = 0
    rejected: int = 0
    epochs: int = 0

    def count(self, outcome: StepResult, work_left: bool) -> None:
        """Adds a step; `work_left`: the step before it left something to do."""
        self.steps += 1
        self.computed_tokens += outcome.computed_tokens
        self.busy_us += outcome.execute_us
        # Waiting for a step counts against the manager only where there was something to plan.
        self.idle_us += outcome.idle_us if work_left else 0


def collect_stats(
    scheduler: Scheduler, totals: EngineTotals, cache: CacheAdmin, *, unread: int, attached: bool
) -> EngineStats:
    """A snapshot of every counter and gauge."""
    pool, host, counters, prompts = scheduler.pool, scheduler.host, scheduler.counters, cache.counters
    prompt = counters.prompt_tokens
    return EngineStats(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_free_blocks=pool.num_cached_free,
        active_blocks=pool.num_active,
        kv_usage=pool.num_active / pool.num_blocks,
        utilization=utilization(scheduler),
        running_sequences=len(scheduler.running),
        waiting_sequences=scheduler.num_waiting,
        prompt_tokens_total=prompt,
        cached_tokens_total=counters.cached_tokens,
        prefix_hit_rate=counters.cached_tokens / prompt if prompt else 0.0,
        generated_tokens_total=counters.generated_tokens,
        evicted_blocks_total=pool.evictions,
        preemptions_total=counters.preemptions,
        steps_total=totals.steps,
        computed_tokens_total=totals.computed_tokens,
        requests_total=totals.requests,
        aborted_requests_total=totals.aborted,
        rejected_requests_total=totals.rejected,
        executor_restarts_total=max(0, totals.epochs - 1),
        hash_alarms_total=pool.hash_alarms + host.hash_alarms,
        executor_idle_us_total=totals.idle_us,
        executor_busy_us_total=totals.busy_us,
        executor_attached=attached,
        published_blocks=pool.num_published,
        pinned_blocks=cache.pins.num_blocks,
        pins=len(cache.pins),
        watchers=cache.log.num_watches,
        prompt_blocks_total=prompts.prompt_blocks,
        cached_blocks_total=prompts.cached_blocks,
        block_hit_rate=prompts.cached_blocks / prompts.prompt_blocks if prompts.prompt_blocks else 0.0,
        misses_never_seen_total=prompts.misses_never_seen,
        misses_evicted_total=prompts.misses_evicted,
        misses_cleared_total=prompts.misses_cleared,
        misses_diverged_total=prompts.misses_diverged,
        misses_partial_tail_total=prompts.misses_partial_tail,
        num_host_blocks=host.num_blocks,
        host_cached_blocks=host.num_cached,
        host_held_blocks=host.num_held,
        swap_preemptions_total=counters.swap_preemptions,
        swapped_out_blocks_total=counters.swapped_out,
        swapped_in_blocks_total=counters.swapped_in,
        written_back_blocks_total=counters.written_back,
        host_evicted_blocks_total=host.evictions,
        unread_sequences=unread,
    )


def utilization(scheduler: Scheduler) -> float:
    """Tokens with keys and values in held blocks / slots of held blocks, 0 to 1; 1 when nothing is held.

    Only the blocks a sequence has not filled yet can have empty slots, and those are held by it alone.
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
    """Up to `limit` blocks from id `start` in a state ("free", "cached", "active", "pinned"; None: any), and where to
    go on.
    """
    # Vector operations: the engine waits for this, and a pool may have millions of blocks.
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
    views = [
        BlockView(
            block,
            pool.ref_count(block),
            pool.table.digest(block) or b"",
            pool.table.parent(block) or b"",
            int(cache.pins.holders[block]),
        )
        for block in blocks[:limit]
    ]
    return views, blocks[limit] if len(blocks) > limit else None
