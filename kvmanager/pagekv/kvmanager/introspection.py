"""Read-only views of pool and scheduler for the cache service; each call is a snapshot between two steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagekv.kvmanager.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.block_pool import BlockPool
from pagekv.kvmanager.engine import BlockView, PrefixMatch, SequenceView, Stats
from pagekv.kvmanager.request import CacheIdentity
from pagekv.kvmanager.scheduler import Scheduler
from pagekv.kvmanager.sequence import LiveRequest, SequenceState


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


def collect_stats(scheduler: Scheduler, totals: EngineTotals, attached: bool) -> Stats:
    """A snapshot of every counter and gauge."""
    pool, counters = scheduler.pool, scheduler.counters
    prompt = counters.prompt_tokens
    return Stats(
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
        hash_alarms_total=pool.hash_alarms,
        executor_idle_us_total=totals.idle_us,
        executor_busy_us_total=totals.busy_us,
        executor_attached=attached,
    )


def utilization(scheduler: Scheduler) -> float:
    """Tokens with keys and values in held blocks / slots of held blocks, 0 to 1; 1 when nothing is held.

    Only the blocks a sequence has not filled yet can have empty slots, and those are held by it alone.
    """
    size = scheduler.pool.block_size
    slots = scheduler.pool.num_active * size
    scheduler.sync()
    empty = sum(len(sequence.block_table) * size - sequence.num_computed for sequence in scheduler.running)
    return 1.0 - empty / slots if slots else 1.0


def match_prefix(pool: BlockPool, fingerprint: str, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch:
    """What is cached of a prompt, without touching it."""
    tokens = token_bytes(token_ids)
    root = root_digest(fingerprint, identity.namespace, identity.adapter_id)
    digests = chain_digests(root, tokens, pool.block_size, identity.media)
    chunks = np.array(token_ids[: len(digests) * pool.block_size], np.uint32).reshape(-1, pool.block_size)
    blocks = pool.match(digests, chunks)
    return PrefixMatch(device_tokens=len(blocks) * pool.block_size, host_tokens=0, block_ids=blocks)


def sequence_views(request: LiveRequest, block_size: int) -> list[SequenceView]:
    """The block tables of a live request."""
    return [
        SequenceView(
            index=sequence.index,
            state="running" if sequence.state is SequenceState.DRAINING else sequence.state.value,
            num_tokens=len(sequence.token_ids),
            computed_tokens=sequence.num_computed,
            block_ids=list(sequence.block_table),
            block_hashes=sequence.digests[: min(len(sequence.block_table), sequence.num_computed // block_size)],
        )
        for sequence in request.sequences
        if sequence.state is not SequenceState.FINISHED
    ]


def block_views(pool: BlockPool, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
    """Up to `limit` blocks from id `start` in a state ("free", "cached", "active"; None: any), and where to go on."""
    found: list[BlockView] = []
    for block in range(start, pool.num_blocks):
        if len(found) == limit:
            return found, block
        digest = pool.table.digest(block)
        kind = "active" if pool.ref_count(block) else "cached" if digest is not None else "free"
        if state in (None, kind):
            found.append(BlockView(block, pool.ref_count(block), digest or b"", pool.table.parent(block) or b""))
    return found, None
