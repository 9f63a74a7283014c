"""The face of the engine loop that services see. `pagekv.kvmanager.engine.loop.EngineLoop` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.request.command import CacheIdentity, GenerateCommand, RequestStream


@dataclass(frozen=True, slots=True)
class ModelInfo:
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


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is cached of a prompt: leading full blocks on the device, then on the host, then the start of one more."""

    device_tokens: int
    host_tokens: int
    block_ids: list[int]
    partial_tokens: int = 0


class BlockOutcome(Enum):
    """What a lookup finds for a block of a prompt; meanings as in the contract."""

    HIT = "hit"
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_IDENTITY = "other identity"
    PARTIAL_TAIL = "partial tail"
    DIVERGED = "diverged"
    CLEARED = "cleared"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """Why positions [start, end) of a prompt hit or miss; fields as in the contract."""

    start: int
    end: int
    outcome: BlockOutcome
    reason: str
    # None for a partial tail.
    block_hash: bytes | None = None
    block_id: int | None = None
    shared_tokens: int = 0
    steps_ago: int | None = None
    seconds_ago: float | None = None


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """A page of a prompt's blocks, and the block to go on from; `cached_tokens` are those of the whole prompt."""

    blocks: list[BlockExplanation]
    next_start: int | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PinResult:
    """Handle and size of a new pin; "" and 0 when nothing of the prompt was cached."""

    pin_id: str
    pinned_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset took away."""

    removed_blocks: int
    preempted_sequences: int = 0
    ended_pins: int = 0


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence's block table as GetBlockTable shows it."""

    index: int
    state: str
    num_tokens: int
    computed_tokens: int
    block_ids: list[int]
    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request as ListRequests shows it; fields as in RequestInfo."""

    request_id: str
    state: str
    priority: int
    num_sequences: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_total_tokens: int
    num_blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block as ListBlocks shows it; hashes are empty unless it is in the prefix table."""

    block_id: int
    ref_count: int
    block_hash: bytes
    parent_hash: bytes
    # Of the holders, those that are pins.
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters and gauges; names, units and meanings as in GetStatsResponse."""

    block_size: int
    num_blocks: int
    free_blocks: int
    cached_free_blocks: int
    active_blocks: int
    kv_usage: float
    utilization: float
    running_sequences: int
    waiting_sequences: int
    prompt_tokens_total: int
    cached_tokens_total: int
    prefix_hit_rate: float
    generated_tokens_total: int
    evicted_blocks_total: int
    preemptions_total: int
    steps_total: int
    computed_tokens_total: int
    requests_total: int
    aborted_requests_total: int
    rejected_requests_total: int
    executor_restarts_total: int
    hash_alarms_total: int
    executor_idle_us_total: int
    executor_busy_us_total: int
    executor_attached: bool
    published_blocks: int = 0
    pinned_blocks: int = 0
    pins: int = 0
    watchers: int = 0
    prompt_blocks_total: int = 0
    cached_blocks_total: int = 0
    block_hit_rate: float = 0.0
    misses_never_seen_total: int = 0
    misses_evicted_total: int = 0
    misses_cleared_total: int = 0
    misses_diverged_total: int = 0
    misses_partial_tail_total: int = 0
    num_host_blocks: int = 0
    host_cached_blocks: int = 0
    host_held_blocks: int = 0
    swap_preemptions_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    written_back_blocks_total: int = 0
    host_evicted_blocks_total: int = 0
    unread_sequences: int = 0


class Engine(Protocol):
    """Every method is called on the event loop that runs the engine loop, and none of them blocks."""

    @property
    def model(self) -> ModelInfo | None:
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

    def stats(self) -> Stats: ...

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch: ...

    def explain_prefix(
        self, token_ids: list[int], identity: CacheIdentity, start: int, limit: int
    ) -> PrefixExplanation:
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

    def reset_prefix_cache(self, force: bool) -> CacheReset | None:
        """Forgets every cached block. While blocks are held: None, and nothing changed; with `force` what holds them is
        preempted, and pins end.
        """
        ...

    def watch_events(self) -> TableWatch:
        """The prefix table now and as it changes; the caller closes it. Raises LimitExceeded, Unavailable."""
        ...
