"""Results of all calls except generation: plain values, no protobuf. Times are in UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

__all__ = [
    "BlockExplanation", "BlockInfo", "BlockList", "BlockOutcome", "BlockRemoved", "BlockState", "BlockStored",
    "CacheReset", "EventBatch", "HealthStatus", "ModelInfo", "Pin", "PinInfo", "PrefixExplanation", "PrefixLookup",
    "RequestInfo", "RequestList", "SequenceBlocks", "SequenceState", "Stats", "TableCleared", "TenantInfo",
    "Tier", "UnknownEvent",
]  # fmt: skip  # one name a line would fill a screen

Tier: TypeAlias = Literal["device", "host"]
# "unknown" stands for values that only later servers know.
SequenceState: TypeAlias = Literal["waiting", "running", "swapped", "unknown"]
BlockState: TypeAlias = Literal["free", "cached", "active", "pinned"]
BlockOutcome: TypeAlias = Literal[
    "hit", "never_seen", "evicted", "other_identity", "partial_tail", "diverged", "cleared", "unreachable", "unknown"
]
HealthStatus: TypeAlias = Literal["serving", "not_serving", "service_unknown", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model and its limits; meanings as in GetModelInfoResponse."""

    model_id: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    backend: str
    max_sequence_tokens: int
    server_version: str
    features: tuple[str, ...]
    sampler: str
    kv_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters (`_total`, since the manager started) and gauges; meanings and units as in GetStatsResponse."""

    block_size: int
    num_device_blocks: int
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
    failed_requests_total: int
    executor_restarts_total: int
    hash_alarms_total: int
    executor_idle_us_total: int
    executor_busy_us_total: int
    executor_attached: bool
    executor_threads: int
    executor_rank_us: tuple[int, ...]
    executor_rank_differences_total: int
    executor_graphs: int
    executor_failed_graphs: int
    published_blocks: int
    pinned_blocks: int
    pins: int
    watchers: int
    prompt_blocks_total: int
    cached_blocks_total: int
    block_hit_rate: float
    misses_never_seen_total: int
    misses_evicted_total: int
    misses_cleared_total: int
    misses_diverged_total: int
    misses_partial_tail_total: int
    num_host_blocks: int
    host_cached_blocks: int
    host_held_blocks: int
    swap_preemptions_total: int
    swapped_out_blocks_total: int
    swapped_in_blocks_total: int
    written_back_blocks_total: int
    host_evicted_blocks_total: int
    unread_sequences: int
    instance_id: str
    start_time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookup:
    """The cached part of a prompt: first tokens in device blocks, then tokens in the host pool, then `partial_tokens`,
    the beginning of a cached block, which is reused by copying that block.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    block_ids: tuple[int, ...]
    partial_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """A live request; fields as in the contract."""

    request_id: str
    state: SequenceState
    priority: int
    num_sequences: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_total_tokens: int
    num_blocks: int
    preemptions: int
    namespace: str
    adapter: str
    create_time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """A page of the `total` live requests, running requests first; `next_page_token` is "" on the last page."""

    requests: tuple[RequestInfo, ...]
    total: int
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBlocks:
    """The block table of one sequence of a live request: logical block i is physical block `block_ids[i]`."""

    index: int
    state: SequenceState
    num_tokens: int
    computed_tokens: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]
    """In hex, of the full blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """One block of the device pool. The hashes are in hex, and empty unless the block is in the prefix table."""

    block_id: int
    ref_count: int
    """Sequences and pins that hold the block."""
    state: BlockState | Literal["unknown"]
    block_hash: str
    parent_hash: str
    pins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """A page of blocks by ascending id; `next_page_token` is "" at the end of the pool."""

    blocks: tuple[BlockInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockExplanation:
    """Why positions [start, end) of a prompt hit or miss; meanings as in the contract's BlockExplanation."""

    start: int
    end: int
    outcome: BlockOutcome
    block_hash: str
    """In hex; empty for a partial tail."""
    block_id: int | None
    reason: str
    """Why the block hits or misses, in words."""
    shared_tokens: int
    steps_ago: int | None
    seconds_ago: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixExplanation:
    """A page of a prompt's blocks; `next_page_token` is "" at the end of the prompt."""

    blocks: tuple[BlockExplanation, ...]
    next_page_token: str
    prompt_tokens: int
    cached_tokens: int
    """Leading tokens cached in full blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A lease on a cached prefix; `pin_id` is "" and `pinned_tokens` 0 when nothing of the prompt was cached."""

    pin_id: str
    pinned_tokens: int
    expire_time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinInfo:
    """A pin whose lease has not ended, with the namespace and adapter of its blocks."""

    pin_id: str
    pinned_tokens: int
    namespace: str
    adapter: str
    expire_time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """A tenant: its limits (None for no limit), its current use, and counters (`_total`, since the manager started);
    meanings and units as in the contract.
    """

    name: str
    weight: float
    max_running: int | None
    max_waiting: int | None
    tokens_per_minute: int | None
    max_blocks: int | None
    max_pinned_blocks: int | None
    max_watchers: int | None
    max_calls: int | None
    tokenized_bytes_per_second: int | None
    min_priority: int | None
    max_priority: int | None
    any_adapter: bool
    adapters: tuple[str, ...]
    floor_blocks: int
    running_requests: int
    waiting_requests: int
    blocks: int
    watchers: int
    requests_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    block_seconds_total: float
    refusals_total: Mapping[str, int]
    """By the limit that refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """The effect of a reset of the prefix cache."""

    removed_blocks: int
    preempted_sequences: int
    ended_pins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block entered the prefix table of a tier. Hashes are in hex; `token_ids` are empty if left out."""

    block_hash: str
    parent_hash: str
    token_ids: tuple[int, ...]
    tier: Tier
    namespace: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A block left the prefix table of a tier."""

    block_hash: str
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCleared:
    """Every block left the prefix tables of both tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """A change that this client does not know: a replica of the tables no longer equals the manager's."""


Event: TypeAlias = BlockStored | BlockRemoved | TableCleared | UnknownEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Changes of the prefix tables, to be applied in order. With `more`, the batch continues in the next EventBatch. A
    batch without events says that nothing changed.
    """

    sequence: int
    snapshot: bool
    """True: part of the first batch, which rebuilds the tables from nothing."""
    events: tuple[Event, ...]
    more: bool
    revision: int
    """Revision of the tables when the whole batch has been applied; 0 with `more`."""
    instance_id: str
    """Identifies the run of the manager to which the revision belongs."""
