"""Answers of `EngineQueries`, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass


def by_name(view: Any) -> dict[str, Any]:
    """The fields of one of these views, for a message with fields of the same names. Unlike `asdict` it copies nothing:
    lists may be long.
    """
    return {name: getattr(view, name) for name in view.__slots__}


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached part of a prompt: leading full blocks on the device, then on the host, then the start of one more."""

    device_tokens: int
    host_tokens: int
    block_ids: list[int]
    partial_tokens: int = 0


class BlockOutcome(Enum):
    """The result of looking up one block of a prompt; meanings as in the contract."""

    HIT = "hit"
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_IDENTITY = "other identity"
    PARTIAL_TAIL = "partial tail"
    DIVERGED = "diverged"
    CLEARED = "cleared"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class ExplainedBlock:
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
class ExplainedPrefix:
    """A page of a prompt's blocks, and the block to go on from; `cached_tokens` are those of the whole prompt."""

    blocks: list[ExplainedBlock]
    next_start: int | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PinResult:
    """Handle and size of a new pin; "" and 0 when nothing of the prompt was cached."""

    pin_id: str
    pinned_tokens: int


@dataclass(frozen=True, slots=True)
class ResetCounts:
    """Numbers of what a reset removed, preempted and ended."""

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
    """A block as ListBlocks shows it; hashes are empty unless its content can be hit."""

    block_id: int
    ref_count: int
    block_hash: bytes
    parent_hash: bytes = b""
    # How many of the holders are pins.
    pins: int = 0


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Both pools at one moment, as arrays by block id. Views of live memory: not to be changed, nor read after the next
    await.
    """

    # Attachments and completed steps of this manager so far.
    epoch: int
    step: int
    ref_counts: NDArray[np.int32]
    # How many holders of each block are pins.
    pins: NDArray[np.int32]
    # Whether the block is in the prefix table.
    published: NDArray[np.bool_]
    evictions: int
    host_ref_counts: NDArray[np.int32]
    # Ids of the host blocks that can be hit, in no particular order.
    host_keyed: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockDetail:
    """A device block and its surroundings."""

    block: BlockView
    # Seconds since its content entered the prefix table; None when it is not there, or nobody notes ages.
    cached_s: float | None
    # Token ids of its content, [block_size]; None unless it is in the prefix table.
    token_ids: list[int] | None
    # The blocks before it in the prefix table, its parent first, and whether the last of them begins a prompt.
    chain: list[int]
    chain_complete: bool
    # Ids of requests with a sequence that holds it, by arrival.
    requests: list[str]


@dataclass(frozen=True, slots=True)
class EngineStats:
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model that the attached executor serves, and the limits of the deployment."""

    model_id: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    backend: str
    # Keys and values of one block, over all layers.
    bytes_per_block: int = 0
