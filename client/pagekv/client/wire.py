"""Between the clients' types and protobuf messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from pagekv.client import types
from pagekv.client.errors import ServerError
from pagekv.common.errors import InvalidRequest
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Values = TypeVar("Values", bound="DataclassInstance")
Request = TypeVar("Request", bound=Message)
WithInput = TypeVar(
    "WithInput",
    pb.GenerateRequest,
    pb.TokenizeRequest,
    cache_pb.LookupPrefixRequest,
    cache_pb.ExplainPrefixRequest,
    cache_pb.PinPrefixRequest,
)

_SAMPLING_FIELDS = frozenset(field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields) - {"n"}
_OPTIONS = frozenset(types.GenerateOptions.__annotations__)


def generate_request(
    prompt: types.Prompt, n: int, options: types.GenerateOptions, *, only_complete: bool
) -> pb.GenerateRequest:
    """The request. Raises InvalidRequest for values that have no place in a message, TypeError for unknown options.

    Bounds are left to the server, which knows the model.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(_OPTIONS))}")
    request = pb.GenerateRequest(only_complete=only_complete)
    set_input(request, prompt)
    values = cast("Mapping[str, Any]", options)
    _set(request.sampling_params, "n", n, "sampling_params.")
    for name in sorted(options.keys() & _SAMPLING_FIELDS):
        if values[name] is not None:
            _set(request.sampling_params, name, values[name], "sampling_params.")
    for name in ("priority", "request_id"):
        if name in options:
            _set(request, name, values[name])
    if "cache" in options:
        set_cache(request.cache, options["cache"])
    return request


def _set(message: Message, name: str, value: Any, prefix: str = "") -> None:
    """Assigns a field, or fills a repeated one or a map; `prefix` is the path of the message in the request.

    Raises InvalidRequest where protobuf refuses: a wrong type, a negative number in an unsigned field.
    """
    field = getattr(message, name)
    try:
        if hasattr(field, "extend"):
            field.extend((value,) if isinstance(value, str) else value)
        elif hasattr(field, "update"):
            field.update(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InvalidRequest(f"{prefix}{name}", f"cannot be {shown}: {error}") from error


def set_input(request: WithInput, prompt: types.Prompt) -> None:
    """Puts a prompt into the request's `input`. Raises InvalidRequest when it is none of the three kinds."""
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    items = list(prompt)
    if not items:
        raise InvalidRequest("input", "must be text, at least one token id or at least one message, is empty")
    first = items[0]
    if isinstance(first, (types.ChatMessage, Mapping)):
        for position, item in enumerate(items):
            _add_message(request, position, item)
    elif isinstance(request, pb.TokenizeRequest):
        raise InvalidRequest("input", "must be text or messages to be encoded, is token ids")
    else:
        # Protobuf refuses items of a wrong kind.
        _set(request.tokenized, "input_ids", items, "tokenized.")


def _add_message(request: WithInput, position: int, item: object) -> None:
    field = f"chat.messages[{position}]"
    if isinstance(item, types.ChatMessage):
        role, content = item.role, item.content
    elif isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        role, content = item["role"], item["content"]
    else:
        raise InvalidRequest(field, f"must have a role and a content and nothing else, is {item!r:.80}")
    message = request.chat.messages.add()
    _set(message, "role", role, f"{field}.")
    _set(message, "content", content, f"{field}.")


def set_cache(message: types_pb2.CacheControls, cache: types.CacheControls) -> None:
    """Fills in cache controls."""
    for name in ("namespace", "adapter_id"):
        _set(message, name, getattr(cache, name), "cache.")
    message.no_read, message.no_write = not cache.read, not cache.write
    for position, media in enumerate(cache.media_hashes):
        added = message.media_hashes.add()
        for name in ("position", "length", "hash"):
            _set(added, name, getattr(media, name), f"cache.media_hashes[{position}].")


def filled(request: Request, **values: Any) -> Request:
    """The request with these fields. Raises InvalidRequest for values that have no place in it."""
    for name, value in values.items():
        _set(request, name, value)
    return request


def prompt_request(
    request: WithInput, prompt: types.Prompt, cache: types.CacheControls | None = None, **values: Any
) -> WithInput:
    """The request with a prompt, cache controls if they are given, and these fields. Raises InvalidRequest."""
    filled(request, **values)
    set_input(request, prompt)
    if cache is not None:
        assert not isinstance(request, pb.TokenizeRequest)
        set_cache(request.cache, cache)
    return request


def list_blocks_request(start: int, limit: int, state: types.BlockState | None) -> cache_pb.ListBlocksRequest:
    """Raises InvalidRequest for an unknown state or negative numbers."""
    request = filled(cache_pb.ListBlocksRequest(), start=start, limit=limit)
    if state is not None:
        if state not in get_args(types.BlockState):
            raise InvalidRequest("state", f"must be one of {', '.join(get_args(types.BlockState))}, got {state!r}")
        request.state = cache_pb.BlockState.Value(f"BLOCK_STATE_{state.upper()}")
    return request


def flat(cls: type[Values], message: Message, **given: Any) -> Values:
    """A dataclass whose fields are the message's, by name, but for those that are given.

    A message becomes the dataclass of its name, a repeated field a tuple, an enum's value its name in lower case
    without the prefix, and an optional field that is not set None. Raises ServerError for a value of an enum that is
    unspecified, or unknown to this client.
    """
    for name, read in _readers(cls, message.DESCRIPTOR):
        if name not in given:
            given[name] = read(message)
    return cls(**given)


@cache
def _readers(cls: type[Any], descriptor: Descriptor) -> list[tuple[str, Callable[[Any], Any]]]:
    """Functions that read the fields of `cls` which the message has."""
    known = descriptor.fields_by_name
    return [(field.name, _reader(known[field.name])) for field in fields(cls) if field.name in known]


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    get, name = attrgetter(field.name), field.name
    # [] is the default of repeated fields in every version of protobuf.
    repeated = field.default_value == []
    if field.message_type is not None:
        made = partial(flat, getattr(types, field.message_type.name))
        return lambda message: tuple(map(made, get(message))) if repeated else made(get(message))
    if field.enum_type is not None:
        return partial(_enum_name, get, field.enum_type.name, _enum_names(field.enum_type))
    if field.has_presence:
        return lambda message: get(message) if message.HasField(name) else None
    return (lambda message: tuple(get(message))) if repeated else get


def _enum_names(enum: EnumDescriptor) -> dict[int, str]:
    """Names of an enum's values in lower case, without the prefix that all of them have, and without UNSPECIFIED."""
    prefix = re.sub("(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return {value.number: value.name.removeprefix(f"{prefix}_").lower() for value in enum.values if value.number}


def _enum_name(get: Callable[[Any], int], enum: str, names: dict[int, str], message: Message) -> str:
    name = names.get(get(message))
    if name is None:
        raise ServerError(
            f"UNKNOWN_{enum.upper()}", f"the server sent a {enum} that this client does not know; update the client"
        )
    return name


_EVENTS = {"stored": types.BlockStored, "removed": types.BlockRemoved, "cleared": types.TableCleared}


def event_batch(message: cache_pb.WatchEventsResponse) -> types.EventBatch:
    """One message of WatchEvents. Raises ServerError for an event that is unknown to this client."""
    return types.EventBatch(message.sequence, message.snapshot, tuple(map(_event, message.events)), message.more)


def _event(message: cache_pb.CacheEvent) -> types.BlockStored | types.BlockRemoved | types.TableCleared:
    kind = message.WhichOneof("event")
    if kind is None:
        raise ServerError("UNKNOWN_EVENT", "the server sent an event that this client does not know; update the client")
    return flat(_EVENTS[kind], getattr(message, kind))
