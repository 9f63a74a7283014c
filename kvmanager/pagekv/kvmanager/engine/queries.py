"""Questions to the engine beside requests: statistics, looks into the cache, pins, resets and watches.

Every call takes effect, or is a snapshot, between two awaits of the engine loop. All are called by
services, and raise Unavailable before the first attachment unless they say otherwise.
"""

from __future__ import annotations

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine import snapshots
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.state import RETRY_DELAY_S, EngineState
from pagekv.kvmanager.engine.views import (
    BlockDetail,
    BlockMap,
    BlockView,
    EngineStats,
    ExplainedPrefix,
    PinResult,
    PrefixMatch,
    RequestView,
    ResetCounts,
    SequenceView,
)
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.events.subscription import TableWatch


class EngineQueries:
    """Owned by the engine loop, which shares its state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def _cache(self) -> CacheAdmin:
        self._state.serving()
        return self._state.cache

    def stats(self) -> EngineStats:
        """A snapshot of every counter and gauge."""
        return snapshots.collect_stats(self._state)

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch:
        """The cached part of a prompt; changes nothing."""
        limits = self._state.serving().limits
        return self._state.cache.lookup(token_ids, identity, limits.prefix_cache and limits.partial_hits)

    def explain_prefix(self, token_ids: list[int], identity: CacheIdentity, start: int, limit: int) -> ExplainedPrefix:
        """Why each of up to `limit` blocks of a prompt, from block `start` on, hits or misses; changes nothing."""
        return self._cache.explain(token_ids, identity, start, limit)

    def pin_prefix(self, token_ids: list[int], identity: CacheIdentity, lease_s: int) -> PinResult:
        """Keeps the cached part of a prompt for `lease_s` seconds. Raises LimitExceeded, with nothing changed."""
        return self._cache.pin(token_ids, identity, lease_s, self._state.live.commands())

    def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens it held, 0 when there is no such pin."""
        return self._cache.unpin(pin_id)

    def watch_events(self) -> TableWatch:
        """The prefix table now and as it changes; the caller closes it. Raises LimitExceeded."""
        if self._state.stopping:
            raise Unavailable("the manager is shutting down", RETRY_DELAY_S)
        return self._cache.watch()

    def block_tables(self, request_id: str) -> list[SequenceView] | None:
        """Block tables of a live request; None when there is no such request, or no executor yet."""
        request = self._state.live.get(request_id)
        return None if request is None else snapshots.sequence_views(request, self._state.config.block_size)

    def list_requests(self, limit: int) -> tuple[list[RequestView], int]:
        """Up to `limit` live requests, running ones first, by arrival; and how many are live."""
        self._state.serving()
        live = self._state.live.all()
        return snapshots.request_views(live, limit), len(live)

    def list_blocks(self, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
        """Up to `limit` blocks by ascending id from `start`, in a state ("free", "cached", "active", "pinned"; None:
        any), and the id to go on from.
        """
        return snapshots.block_views(self._cache, start, limit, state)

    def block_map(self) -> BlockMap | None:
        """Every block of both pools, as arrays; None before the first attachment."""
        return None if self._state.scheduler is None else snapshots.block_map(self._state)

    def block_detail(self, block: int) -> BlockDetail:
        """A device block and its place in the prefix table and in live requests. Raises InvalidRequest."""
        self._state.serving()
        return snapshots.block_detail(self._state, block)

    def host_block(self, block: int) -> BlockView:
        """A block of the host pool, without its parent. Raises InvalidRequest."""
        return snapshots.host_block_view(self._state.serving().host, block)

    def reset_prefix_cache(self, force: bool) -> ResetCounts | None:
        """Removes every cached block. While blocks are held: None, and nothing changed; with `force` running sequences
        are preempted, and pins end.
        """
        return self._state.cache.reset(self._state.serving(), force)
