"""Between the clients' types and protobuf messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast, get_args

from google.protobuf.message import Message

from pagekv.client.errors import ServerError
from pagekv.client.types import (
    BlockExplanation,
    BlockInfo,
    BlockList,
    BlockOutcome,
    BlockRemoved,
    BlockState,
    BlockStored,
    CacheControls,
    CacheReset,
    ChatMessage,
    Chunk,
    Completion,
    EventBatch,
    FinishReason,
    GenerateOptions,
    ModelInfo,
    Pin,
    PositionLogprobs,
    PrefixExplanation,
    PrefixLookup,
    Prompt,
    RequestInfo,
    RequestList,
    SequenceBlocks,
    Stats,
    TableCleared,
    Tier,
    TokenLogprob,
)
from pagekv.common.errors import InvalidRequest
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

Flat = TypeVar("Flat", ModelInfo, Stats, PrefixLookup, RequestInfo, SequenceBlocks, Pin, CacheReset)
WithInput = TypeVar(
    "WithInput",
    pb.GenerateRequest,
    pb.TokenizeRequest,
    cache_pb.LookupPrefixRequest,
    cache_pb.ExplainPrefixRequest,
    cache_pb.PinPrefixRequest,
)

_SAMPLING_FIELDS = frozenset(field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields) - {"n"}
_TIERS: Mapping[int, Tier] = {cache_pb.TIER_DEVICE: "device", cache_pb.TIER_HOST: "host"}
_OPTIONS = frozenset(GenerateOptions.__annotations__)


def generate_request(prompt: Prompt, n: int, options: GenerateOptions, *, only_complete: bool) -> pb.GenerateRequest:
    """The request. Raises InvalidRequest for values that have no place in a message, TypeError for unknown options.

    Bounds are the server's matter: it alone knows the model.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(_OPTIONS))}")
    request = pb.GenerateRequest(only_complete=only_complete)
    set_input(request, prompt)
    sampling = request.sampling_params
    _assign("sampling_params.n", n, lambda: setattr(sampling, "n", n))
    for name in sorted(options.keys() & _SAMPLING_FIELDS):
        value: Any = cast("Mapping[str, Any]", options)[name]
        if value is not None:
            _assign(f"sampling_params.{name}", value, _setter(sampling, name, value))
    for name in ("priority", "request_id"):
        if name in options:
            value = cast("Mapping[str, Any]", options)[name]
            _assign(name, value, _setter(request, name, value))
    if "cache" in options:
        set_cache(request.cache, options["cache"])
    return request


def _setter(message: Message, name: str, value: Any) -> Callable[[], Any]:
    held = getattr(message, name)
    if name == "stop" and isinstance(value, str):
        value = (value,)
    if isinstance(value, Mapping):
        return lambda: held.update(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return lambda: held.extend(value)
    return lambda: setattr(message, name, value)


def _assign(field: str, value: object, assign: Callable[[], Any]) -> None:
    """Runs an assignment; protobuf's refusals (wrong type, negative in an unsigned field) become InvalidRequest."""
    try:
        assign()
    except (TypeError, ValueError, AttributeError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InvalidRequest(field, f"cannot be {shown}: {error}") from error


def set_input(request: WithInput, prompt: Prompt) -> None:
    """Puts a prompt into the request's `input`. Raises InvalidRequest when it is none of the three kinds."""
    if isinstance(prompt, str):
        _assign("text", prompt, lambda: setattr(request, "text", prompt))
        return
    items = list(prompt)
    if not items:
        raise InvalidRequest("input", "must be text, at least one token id or at least one message, is empty")
    first = items[0]
    if isinstance(first, (ChatMessage, Mapping)):
        for position, item in enumerate(items):
            _add_message(request, position, item)
    elif isinstance(request, pb.TokenizeRequest):
        raise InvalidRequest("input", "must be text or messages to be encoded, is token ids")
    else:
        ids = request.tokenized.input_ids
        # A wrong kind of item is protobuf's to refuse.
        _assign("tokenized.input_ids", items, lambda: ids.extend(cast("list[int]", items)))


def _add_message(request: WithInput, position: int, item: object) -> None:
    field = f"chat.messages[{position}]"
    if isinstance(item, ChatMessage):
        role, content = item.role, item.content
    elif isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        role, content = item["role"], item["content"]
    else:
        raise InvalidRequest(field, f"must have a role and a content and nothing else, is {item!r:.80}")
    message = request.chat.messages.add()
    _assign(f"{field}.role", role, lambda: setattr(message, "role", role))
    _assign(f"{field}.content", content, lambda: setattr(message, "content", content))


def set_cache(message: types_pb2.CacheControls, cache: CacheControls) -> None:
    """Fills in cache controls."""
    for name in ("namespace", "adapter_id"):
        value = getattr(cache, name)
        _assign(f"cache.{name}", value, _setter(message, name, value))
    message.no_read, message.no_write = not cache.read, not cache.write
    for position, media in enumerate(cache.media_hashes):
        added = message.media_hashes.add()
        for name in ("position", "length", "hash"):
            value = getattr(media, name)
            _assign(f"cache.media_hashes[{position}].{name}", value, _setter(added, name, value))


def tokenize_request(prompt: Prompt) -> pb.TokenizeRequest:
    """Raises InvalidRequest unless the prompt is text or messages."""
    request = pb.TokenizeRequest()
    set_input(request, prompt)
    return request


def lookup_request(prompt: Prompt, cache: CacheControls | None) -> cache_pb.LookupPrefixRequest:
    """Raises InvalidRequest for a prompt that has no place in a message."""
    request = cache_pb.LookupPrefixRequest()
    set_input(request, prompt)
    if cache is not None:
        set_cache(request.cache, cache)
    return request


def explain_request(
    prompt: Prompt, cache: CacheControls | None, start: int, limit: int
) -> cache_pb.ExplainPrefixRequest:
    """Raises InvalidRequest for a prompt that has no place in a message, or negative numbers."""
    request = cache_pb.ExplainPrefixRequest()
    _assign("start", start, lambda: setattr(request, "start", start))
    _assign("limit", limit, lambda: setattr(request, "limit", limit))
    set_input(request, prompt)
    if cache is not None:
        set_cache(request.cache, cache)
    return request


def pin_request(prompt: Prompt, cache: CacheControls | None, lease_seconds: int) -> cache_pb.PinPrefixRequest:
    """Raises InvalidRequest for a prompt that has no place in a message, or a negative lease."""
    request = cache_pb.PinPrefixRequest()
    _assign("lease_seconds", lease_seconds, lambda: setattr(request, "lease_seconds", lease_seconds))
    set_input(request, prompt)
    if cache is not None:
        set_cache(request.cache, cache)
    return request


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """Raises InvalidRequest for ids that are no token ids."""
    request = pb.DetokenizeRequest()
    _assign("token_ids", token_ids, lambda: request.token_ids.extend(token_ids))
    return request


def list_requests_request(limit: int) -> cache_pb.ListRequestsRequest:
    """Raises InvalidRequest for a negative number."""
    request = cache_pb.ListRequestsRequest()
    _assign("limit", limit, lambda: setattr(request, "limit", limit))
    return request


def request_list(response: cache_pb.ListRequestsResponse) -> RequestList:
    """Protobuf to plain values."""
    return RequestList([flat(RequestInfo, request) for request in response.requests], response.total)


def list_blocks_request(start: int, limit: int, state: BlockState | None) -> cache_pb.ListBlocksRequest:
    """Raises InvalidRequest for an unknown state or negative numbers."""
    request = cache_pb.ListBlocksRequest()
    _assign("start", start, lambda: setattr(request, "start", start))
    _assign("limit", limit, lambda: setattr(request, "limit", limit))
    if state is not None:
        if state not in get_args(BlockState):
            raise InvalidRequest("state", f"must be one of {', '.join(get_args(BlockState))}, got {state!r}")
        request.state = cache_pb.BlockState.Value(f"BLOCK_STATE_{state.upper()}")
    return request


def flat(cls: type[Flat], message: Message) -> Flat:
    """A dataclass whose fields are the message's, by name."""
    # Any: the dataclass and the message were written field for field alike, which a test checks.
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(cls)}
    plain = (str, int, float, bool)
    for name, value in values.items():
        values[name] = value if isinstance(value, plain) else tuple(value)
    return cls(**values)


def block_list(message: cache_pb.ListBlocksResponse) -> BlockList:
    """ListBlocks' answer."""
    return BlockList(
        blocks=tuple(
            BlockInfo(
                block_id=block.block_id,
                ref_count=block.ref_count,
                state=cast("BlockState", _short(cache_pb.BlockState.Name(block.state))),
                block_hash=block.block_hash,
                parent_hash=block.parent_hash,
                pins=block.pins,
            )
            for block in message.blocks
        ),
        next_start=message.next_start if message.HasField("next_start") else None,
    )


def explanation(message: cache_pb.ExplainPrefixResponse) -> PrefixExplanation:
    """ExplainPrefix's answer."""
    return PrefixExplanation(
        blocks=tuple(_block_explanation(block) for block in message.blocks),
        next_start=message.next_start if message.HasField("next_start") else None,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
    )


def _block_explanation(message: cache_pb.BlockExplanation) -> BlockExplanation:
    outcome = cache_pb.BlockOutcome.Name(message.outcome).removeprefix("BLOCK_OUTCOME_").lower()
    return BlockExplanation(
        start=message.start,
        end=message.end,
        outcome=cast("BlockOutcome", outcome),
        block_hash=message.block_hash,
        block_id=message.block_id if message.HasField("block_id") else None,
        reason=message.reason,
        shared_tokens=message.shared_tokens,
        steps_ago=message.steps_ago if message.HasField("steps_ago") else None,
        seconds_ago=message.seconds_ago if message.HasField("seconds_ago") else None,
    )


def event_batch(message: cache_pb.WatchEventsResponse) -> EventBatch:
    """One message of WatchEvents."""
    return EventBatch(message.sequence, message.snapshot, tuple(map(_event, message.events)), message.more)


def _event(message: cache_pb.CacheEvent) -> BlockStored | BlockRemoved | TableCleared:
    kind = message.WhichOneof("event")
    if kind == "stored":
        stored = message.stored
        return BlockStored(stored.block_hash, stored.parent_hash, tuple(stored.token_ids), _tier(stored.tier))
    if kind == "removed":
        return BlockRemoved(message.removed.block_hash, _tier(message.removed.tier))
    if kind == "cleared":
        return TableCleared()
    raise ServerError("UNKNOWN_EVENT", "the server sent an event that this client does not know; update the client")


def _tier(tier: int) -> Tier:
    name = _TIERS.get(tier)
    if name is None:
        raise ServerError(
            "UNKNOWN_TIER", "the server sent an event of a tier that this client does not know; update it"
        )
    return name


def chunk(request_id: str, message: pb.GenerateChunk) -> Chunk:
    """A chunk of a stream."""
    return Chunk(
        request_id=request_id,
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        logprobs=_logprobs(message.logprobs),
    )


def completion(request_id: str, message: pb.GenerateComplete) -> Completion:
    """The end of a sequence."""
    matched = message.WhichOneof("matched_stop")
    return Completion(
        request_id=request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.output_ids),
        finish_reason=cast("FinishReason", _short(types_pb2.FinishReason.Name(message.finish_reason))),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
        preemptions=message.preemptions,
        logprobs=_logprobs(message.logprobs),
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _logprobs(messages: Sequence[types_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            chosen=TokenLogprob(position.chosen.token_id, position.chosen.logprob),
            top=tuple(TokenLogprob(top.token_id, top.logprob) for top in position.top),
        )
        for position in messages
    )


def _short(name: str) -> str:
    """FINISH_REASON_STOP to stop."""
    return name.rpartition("_")[2].lower()
