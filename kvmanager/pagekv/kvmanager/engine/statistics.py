"""Statistics of the engine: counters and gauges, each a snapshot between two awaits of the loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.tenant_list import tenant_blocks
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.v1 import operator_service_pb2 as operator_pb


class EngineStatistics:
    """Owned by the engine loop. Methods raise Unavailable before the first attachment unless they say otherwise."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def stats(self) -> operator_pb.GetStatsResponse:
        state, scheduler, cache = self._state, self._state.serving(), self._state.cache
        pool, host, counters, prompts = scheduler.pool, scheduler.host, scheduler.counters, cache.counters
        stats = operator_pb.GetStatsResponse(
            block_size=pool.block_size,
            num_device_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_free_blocks=pool.num_cached_free,
            active_blocks=pool.num_active,
            kv_usage=pool.num_active / pool.num_blocks,
            utilization=utilization(scheduler),
            running_sequences=len(scheduler.running),
            waiting_sequences=scheduler.num_waiting,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            prefix_hit_rate=counters.cached_tokens / max(1, counters.prompt_tokens),
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
            block_hit_rate=prompts.cached_blocks_total / max(1, prompts.prompt_blocks_total),
            num_host_blocks=host.num_blocks,
            host_cached_blocks=host.num_cached,
            host_held_blocks=host.num_held,
            swap_preemptions_total=counters.swap_preemptions,
            swapped_out_blocks_total=counters.swapped_out,
            swapped_in_blocks_total=counters.swapped_in,
            written_back_blocks_total=counters.written_back,
            host_evicted_blocks_total=host.evictions,
            unread_sequences=state.live.num_unread.total,
            instance_id=state.instance_id,
        )
        stats.start_time.FromMilliseconds(int(state.started * 1e3))
        stats.MergeFrom(state.totals)
        stats.MergeFrom(prompts)
        return stats

    def promised_blocks(self) -> int:
        """Blocks that the running sequences need once each is as long as it may become, if none shared any. If that is
        more than the pool has, the pool is oversubscribed, and sequences may have to be preempted.
        """
        scheduler = self._state.serving()
        # Counted as in `blocks_needed`: the last token is sampled and needs no slot.
        return sum(-(-(sequence.max_total - 1) // scheduler.pool.block_size) for sequence in scheduler.running)

    def ref_counts(self) -> NDArray[np.int32]:
        """Holders of each block of the device, [num_blocks]: live memory, not to be read after an await."""
        return self._state.serving().pool.ref_counts

    def tenant_blocks(self) -> list[tuple[Account, int]]:
        """Every tenant's account, and its number of blocks; never raises."""
        return tenant_blocks(self._state)


def utilization(scheduler: Scheduler) -> float:
    """Tokens with keys and values in held blocks / slots of held blocks, 0 to 1; 1 when nothing is held.

    Only blocks that their sequence has not filled yet can have empty slots, and each of those has one holder.
    """
    size = scheduler.pool.block_size
    slots = scheduler.pool.num_active * size
    empty = sum(len(sequence.block_table) * size - sequence.num_computed for sequence in scheduler.running)
    return 1.0 - empty / slots if slots else 1.0
