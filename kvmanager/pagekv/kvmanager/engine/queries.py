"""What services ask of the engine besides requests: statistics, a look into the cache, pins and resets.

Every call takes effect, or is a snapshot, between two awaits of the engine loop.
"""

from __future__ import annotations

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.snapshots import EngineTotals, block_views, collect_stats, request_views, sequence_views
from pagekv.kvmanager.engine.view import EngineView
from pagekv.kvmanager.engine.views import (
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
from pagekv.kvmanager.scheduling.scheduler import Scheduler

RETRY_DELAY_S = 1.0


class EngineQueries:
    """The half of the engine loop that steps nothing. What it looks at is the loop's, which sets it."""

    _config: EngineConfig
    _cache: CacheAdmin
    _live: LiveRequests
    _totals: EngineTotals
    # None until an executor is attached for the first time.
    _scheduler: Scheduler | None
    _attached: bool
    _stopping: bool

    def stats(self) -> EngineStats:
        """A snapshot of every counter and gauge. Raises Unavailable before the first attachment."""
        scheduler, unread = self._serving(), self._live.num_unread
        return collect_stats(scheduler, self._totals, self._cache, unread=unread, attached=self._attached)

    def view(self) -> EngineView | None:
        """The structures themselves, for the live page; None until an executor is attached for the first time."""
        if self._scheduler is None:
            return None
        return EngineView(self._scheduler, self._cache, self._live, self._totals.epochs, self._totals.steps)

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch:
        """What is cached of a prompt; changes nothing. Raises Unavailable before the first attachment."""
        limits = self._serving().limits
        return self._cache.lookup(token_ids, identity, limits.prefix_cache and limits.partial_hits)

    def explain_prefix(self, token_ids: list[int], identity: CacheIdentity, start: int, limit: int) -> ExplainedPrefix:
        """Why a page of a prompt's blocks hits or misses. Raises Unavailable before the first attachment."""
        self._serving()
        return self._cache.explain(token_ids, identity, start, limit)

    def pin_prefix(self, token_ids: list[int], identity: CacheIdentity, lease_s: int) -> PinResult:
        """Keeps what is cached of a prompt for a while. Raises LimitExceeded, Unavailable."""
        self._serving()
        return self._cache.pin(token_ids, identity, lease_s, self._live.commands())

    def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens it held, 0 when there is no such pin. Raises Unavailable before the first attachment."""
        self._serving()
        return self._cache.unpin(pin_id)

    def watch_events(self) -> TableWatch:
        """The prefix table now and as it changes. Raises LimitExceeded, Unavailable."""
        if self._stopping:
            raise Unavailable("the manager is shutting down", RETRY_DELAY_S)
        self._serving()
        return self._cache.watch()

    def block_tables(self, request_id: str) -> list[SequenceView] | None:
        """Block tables of a live request; None when there is no such request."""
        request = self._live.get(request_id)
        return None if request is None else sequence_views(request, self._config.block_size)

    def list_requests(self, limit: int) -> tuple[list[RequestView], int]:
        """Up to `limit` live requests, those that run first; and how many there are. Raises Unavailable when never
        attached.
        """
        self._serving()
        live = self._live.all()
        return request_views(live, limit), len(live)

    def list_blocks(self, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
        """Blocks by ascending id from `start`, and the id to go on from. Raises Unavailable when never attached."""
        self._serving()
        return block_views(self._cache, start, limit, state)

    def reset_prefix_cache(self, force: bool) -> ResetCounts | None:
        """Forgets every cached block. While blocks are held: None, and nothing changed; with `force` what holds them is
        preempted, and pins end.
        """
        return self._cache.reset(self._serving(), force)

    def check_integrity(self) -> None:
        """Recomputes every counter from scratch; raises InvariantError."""
        scheduler = self._serving()
        scheduler.check_integrity(self._live.sequences(), self._cache.pins.tables())

    def _serving(self) -> Scheduler:
        if self._scheduler is None:
            raise Unavailable("no executor is attached yet", RETRY_DELAY_S)
        return self._scheduler
