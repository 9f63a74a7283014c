"""The face of the engine loop that services see. `pagekv.kvmanager.engine.loop.EngineLoop` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the attached executor serves and the limits of the deployment."""

    model_id: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    backend: str
    # Of keys and values in a block, over all layers.
    bytes_per_block: int = 0


class Engine(Protocol):
    """Every method is called on the event loop that runs the engine loop, and none of them blocks."""

    @property
    def model(self) -> EngineInfo | None:
        """None until an executor is attached for the first time."""
        ...

    def submit(self, command: GenerateCommand) -> RequestStream:
        """Queues a request. Raises AlreadyExists, Overloaded, Unavailable, or InvalidRequest when it can never fit."""
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets finish ABORT. False when it is not live. Blocks are back within one step."""
        ...

    def leave(self, stream: RequestStream) -> None:
        """The reader has left: what still runs of its request ends as by `abort`. Never of another that has its id.
        To be called for every stream: what has ended counts as unread until then.
        """
        ...

    def stop_sequence(self, stream: RequestStream, index: int) -> None:
        """The reader found a stop string: ends one sequence quietly; nothing more is pushed for it."""
        ...

    def stats(self) -> EngineStats: ...

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch: ...

    def explain_prefix(self, token_ids: list[int], identity: CacheIdentity, start: int, limit: int) -> ExplainedPrefix:
        """Why each of up to `limit` blocks of a prompt, from block `start` on, hits or misses; changes nothing."""
        ...

    def pin_prefix(self, token_ids: list[int], identity: CacheIdentity, lease_s: int) -> PinResult:
        """Keeps what is cached of a prompt for `lease_s` seconds. Raises LimitExceeded, with nothing changed."""
        ...

    def unpin_prefix(self, pin_id: str) -> int:
        """Ends a pin; tokens it held, 0 when there is no such pin."""
        ...

    def block_tables(self, request_id: str) -> list[SequenceView] | None:
        """None when there is no such request."""
        ...

    def list_requests(self, limit: int) -> tuple[list[RequestView], int]:
        """Up to `limit` live requests, those that run first, by arrival; and how many there are."""
        ...

    def list_blocks(self, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
        """Blocks by ascending id from `start`; state "free", "cached", "active", "pinned" or None. Second: where to go
        on.
        """
        ...

    def reset_prefix_cache(self, force: bool) -> ResetCounts | None:
        """Forgets every cached block. While blocks are held: None, and nothing changed; with `force` what holds them is
        preempted, and pins end.
        """
        ...

    def watch_events(self) -> TableWatch:
        """The prefix table now and as it changes; the caller closes it. Raises LimitExceeded, Unavailable."""
        ...
