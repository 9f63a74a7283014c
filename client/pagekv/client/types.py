"""Arguments and results of the clients: plain values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias, TypedDict

__all__ = [
    "BlockExplanation", "BlockInfo", "BlockList", "BlockRemoved", "BlockStored", "CacheControls", "CacheReset",
    "ChatMessage", "Chunk", "Completion", "EventBatch", "GenerateOptions", "MediaHash", "ModelInfo", "Pin", "PinInfo",
    "PositionLogprobs", "PrefixExplanation", "PrefixLookup", "Prompt", "RequestInfo", "RequestList", "SequenceBlocks",
    "SequenceState", "Stats", "TableCleared", "Tier", "TokenLogprob", "UnknownEvent",
]  # fmt: skip  # one name a line would fill a screen

# "unknown" is anything that only later servers say.
FinishReason: TypeAlias = Literal["stop", "length", "abort", "unknown"]
Tier: TypeAlias = Literal["device", "host"]
SequenceState: TypeAlias = Literal["waiting", "running", "swapped", "unknown"]
BlockState: TypeAlias = Literal["free", "cached", "active", "pinned"]
BlockOutcome: TypeAlias = Literal[
    "hit",
    "never_seen",
    "evicted",
    "other_identity",
    "partial_tail",
    "diverged",
    "cleared",
    "unreachable",
    "unknown",
]
HealthStatus: TypeAlias = Literal["SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", "UNKNOWN"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `role` is "system", "user" or "assistant" for most chat templates."""

    role: str
    content: str


# Text, token ids, or a conversation (messages, or mappings with the keys role and content).
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class MediaHash:
    """Prompt positions [position, position + length) stand for a medium whose content has this digest."""

    position: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class CacheControls:
    """The requests that share cached blocks, and whether this one reads and writes the prefix cache."""

    namespace: str = ""
    media_hashes: tuple[MediaHash, ...] = ()
    read: bool = True
    write: bool = True


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating method. An option left out takes the server's default (types.proto)."""

    # Softmax temperature, 0 to 100; 0 is greedy. Default 1.
    temperature: float
    # Nucleus, above 0 and up to 1. Default 1: off.
    top_p: float
    # Only the k likeliest tokens; 0 is off.
    top_k: int
    # Only tokens at least this share as likely as the likeliest, 0 to 1; 0 is off.
    min_p: float
    # Tokens to generate at most. Default 16, for chat what the context leaves.
    max_tokens: int
    # Tokens to generate before anything but max_tokens may end the sequence.
    min_tokens: int
    # Seed of the random choices. Default: drawn by the client, so that a broken stream can go on with it; none of
    # beam search.
    seed: int
    # String or strings that end the text, which stops before them.
    stop: str | Sequence[str]
    # Token ids that end the sequence besides the model's own.
    stop_token_ids: Sequence[int]
    # True: the model's end-of-sequence token does not end the sequence.
    ignore_eos: bool
    # Above 0 and up to 10. Default 1: off.
    repetition_penalty: float
    # -2 to 2. Default 0: off.
    presence_penalty: float
    # -2 to 2. Default 0: off.
    frequency_penalty: float
    # Return log-probabilities of the chosen token and this many likeliest, 0 to 20.
    logprobs: int
    # Added to the logits of single tokens, by token id.
    logit_bias: Mapping[int, float]
    # Beam search with this many hypotheses at once, 1 to 32; 0 is off. The `n` best come back, best first, when all are
    # known: there are no chunks. Sampling options must be left out, a temperature must be 0.
    beam_width: int
    # Beam search compares results by logprob / tokens ** length_penalty, so above 0 longer ones gain; -10 to 10.
    # Default 1.
    length_penalty: float
    # True: beam search is over once beam_width hypotheses have ended, whatever the others promise.
    early_stopping: bool
    # Prefix cache controls.
    cache: CacheControls
    # The adapter to answer with, which separates cache entries and no more. Default: none.
    adapter: str
    # Lower runs earlier, -100 to 100. Default 0.
    priority: int
    # Unique among running requests. Default: made by the server.
    request_id: str
    # Seconds for the whole generation, resumed parts included. Default: no limit.
    timeout: float | None
    # Seconds to go on trying after the connection was lost; 0: never resume. Default: the client's.
    resume_timeout: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one generated position: the chosen token's, and the likeliest tokens', best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence. `token_ids`, `text` and `logprobs` are deltas, the counts are cumulative."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    # Never splits a character; empty while what follows may become a stop string.
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    # Prompt tokens served from the prefix cache when the sequence was first admitted.
    cached_tokens: int
    # One of the two where finish_reason is "stop".
    stop_token_id: int | None = None
    stop_string: str | None = None
    # Times that the server preempted the sequence.
    preemptions: int = 0
    # Times that the stream broke and was resumed.
    resumes: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    # Sum of the natural-log probabilities of token_ids; of beam search only.
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model served and its limits; meanings as in GetModelInfoResponse."""

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


@dataclass(frozen=True, slots=True)
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
    # In UTC.
    start_time: datetime | None


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """The cached part of a prompt: leading tokens in device blocks, then further ones in the host pool.

    `partial_tokens` more are the beginning of a cached block, which a copy of it serves.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    block_ids: tuple[int, ...]
    partial_tokens: int


@dataclass(frozen=True, slots=True)
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
    # In UTC.
    create_time: datetime | None


@dataclass(frozen=True, slots=True)
class RequestList:
    """A page of the live requests, those that run first; `total`: how many there are; `next_page_token` is "" at the
    end.
    """

    requests: tuple[RequestInfo, ...]
    total: int
    next_page_token: str


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """The block table of one sequence of a live request: logical block i is physical block `block_ids[i]`."""

    index: int
    state: SequenceState
    num_tokens: int
    computed_tokens: int
    block_ids: tuple[int, ...]
    # In hex, of the full blocks only.
    block_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of the device pool; the hashes are in hex, empty unless it is in the prefix table."""

    block_id: int
    # Sequences and pins that hold the block.
    ref_count: int
    state: BlockState | Literal["unknown"]
    block_hash: str
    parent_hash: str
    pins: int


@dataclass(frozen=True, slots=True)
class BlockList:
    """A page of blocks by ascending id; `next_page_token` is "" at the end of the pool."""

    blocks: tuple[BlockInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """Why positions [start, end) of a prompt hit or miss; meanings as in the contract's BlockExplanation."""

    start: int
    end: int
    outcome: BlockOutcome
    # In hex; empty for a partial tail.
    block_hash: str
    block_id: int | None
    # In words.
    reason: str
    shared_tokens: int
    steps_ago: int | None
    seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """A page of a prompt's blocks; `next_page_token` is "" at the end of the prompt."""

    blocks: tuple[BlockExplanation, ...]
    next_page_token: str
    prompt_tokens: int
    # Leading tokens cached in full blocks.
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A lease on a cached prefix; "" and 0 when nothing of the prompt was cached."""

    pin_id: str
    pinned_tokens: int
    # In UTC.
    expire_time: datetime | None


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin whose lease runs, with the namespace and adapter of the blocks that it keeps."""

    pin_id: str
    pinned_tokens: int
    namespace: str
    adapter: str
    # In UTC.
    expire_time: datetime | None


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The effect of a reset of the prefix cache."""

    removed_blocks: int
    preempted_sequences: int
    ended_pins: int


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block entered the prefix table of a tier; hashes in hex, `token_ids` empty when they were left out."""

    block_hash: str
    parent_hash: str
    token_ids: tuple[int, ...]
    tier: Tier
    namespace: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block left the prefix table of a tier."""

    block_hash: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class TableCleared:
    """Every block left the prefix tables of both tiers."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A change that this client does not know: a table kept up with the events is no longer the manager's."""


Event: TypeAlias = BlockStored | BlockRemoved | TableCleared | UnknownEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Changes of the prefix tables, to be applied in order; with `more`, the batch goes on in the next of these. One
    without events says that nothing changed.
    """

    sequence: int
    # True: part of the first batch, which rebuilds the tables from nothing.
    snapshot: bool
    events: tuple[Event, ...]
    more: bool
    # Of the tables, when the batch is applied whole; 0 with `more`.
    revision: int
    # The run of the manager that revisions belong to.
    instance_id: str
