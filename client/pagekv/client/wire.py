"""Converts between the clients' types and protobuf messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, fields
from datetime import UTC
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, get_args

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from pagekv.client import generation_types, types
from pagekv.client.generation_types import CacheControls, ChatMessage, GenerateOptions, Prompt
from pagekv.client.options import check_known
from pagekv.common.errors import InvalidRequest
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Values = TypeVar("Values", bound="DataclassInstance")
Request = TypeVar("Request", bound=Message)

_SAMPLING_FIELDS = frozenset(field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields)
# Sequences of numbers that are never meant as token ids.
_BYTES = (bytes, bytearray, memoryview)


def generate_request(prompt: Prompt, n: int, options: GenerateOptions, *, only_complete: bool) -> pb.GenerateRequest:
    """The request for a generation. Raises InvalidRequest for values that do not fit into a message, TypeError for
    unknown options. The server checks bounds, because it knows the model.
    """
    check_known(options, GenerateOptions)
    values = {name: value for name, value in {**options, "n": n}.items() if value is not None}
    sampling = {name: values[name] for name in values.keys() & _SAMPLING_FIELDS}
    others = {name: values[name] for name in ("priority", "request_id", "adapter") if name in values}
    request = pb.GenerateRequest(only_complete=only_complete)
    return prompt_request(request, prompt, options.get("cache"), sampling_params=sampling, **others)


def prompt_request(request: Request, prompt: Prompt, cache: CacheControls | None = None, **values: Any) -> Request:
    """The request, filled with a prompt, cache controls if they are given, and these fields. Raises InvalidRequest."""
    filled(request, prompt=_prompt(prompt), **values)
    if cache is None:
        return request
    if not isinstance(cache, CacheControls):
        raise InvalidRequest("cache", f"must be a CacheControls or None, is {_shown(cache)}")
    # True is the server's default for `read` and `write`, and calls that only look refuse both fields.
    return filled(request, cache={name: value for name, value in asdict(cache).items() if value is not True})


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The fields of a Prompt message. Raises InvalidRequest unless the prompt is of one of the three kinds."""
    if isinstance(prompt, str):
        return {"text": prompt}
    # Elements of a set have no order of their own.
    if not _is_iterable(prompt) or isinstance(prompt, (*_BYTES, Mapping, Set)):
        advice = ": decode it first" if isinstance(prompt, _BYTES) else ""
        raise InvalidRequest("prompt", f"must be text, token ids or messages, is {_shown(prompt)}{advice}")
    items = list(prompt)
    if not items:
        raise InvalidRequest("prompt", "must be text, at least one token id or at least one message, is empty")
    if isinstance(items[0], str):
        given = f"is a list of texts, of which each is a call of its own: {_shown(items)}"
        raise InvalidRequest("prompt", f"must be text, token ids or messages, {given}")
    if isinstance(items[0], (ChatMessage, Mapping)):
        return {"chat": {"messages": [_message(position, item) for position, item in enumerate(items)]}}
    # Protobuf refuses items of a wrong kind.
    return {"token_ids": {"ids": items}}


def _is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it gives items. Arrays of no dimension have the method for it, and do not."""
    try:
        iter(value)  # type: ignore[call-overload]  # callers pass anything
    except TypeError:
        return False
    return True


def _message(position: int, item: object) -> Mapping[str, Any]:
    if isinstance(item, ChatMessage):
        return asdict(item)
    if isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        return item
    problem = f"must have a role and a content and nothing else, is {item!r:.80}"
    raise InvalidRequest(f"prompt.chat.messages[{position}]", problem)


def filled(request: Request, **values: Any) -> Request:
    """The request with these fields set; a mapping fills a nested message. Raises InvalidRequest, which names the path
    of the field and the values that it takes, for a value of another type and for a number that does not fit into the
    field.
    """
    _fill(request, values, "")
    return request


def _fill(message: Message, values: Mapping[str, Any], path: str) -> None:
    # Any: the type stubs have two kinds of descriptors, which are the same at run time.
    descriptor: Any = message.DESCRIPTOR
    for name, value in values.items():
        field, known = getattr(message, name), descriptor.fields_by_name[name]
        try:
            if isinstance(field, Message):
                _fill(field, value, f"{path}{name}.")
            elif hasattr(field, "add"):
                for position, each in enumerate(value):
                    _fill(field.add(), each, f"{path}{name}[{position}].")
            elif hasattr(field, "extend"):
                field.extend(_entries(known, value))
            elif hasattr(field, "update"):
                field.update(value)
            else:
                setattr(message, name, _single(known, value))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            # For a list, protobuf's message says which entry does not fit.
            reason = f": {error}" if str(error) and known.default_value == [] else ""
            raise InvalidRequest(f"{path}{name}", f"must be {_wanted(known)}, is {_shown(value)}{reason}") from error


def _entries(field: FieldDescriptor, value: Any) -> Any:
    """Entries for a repeated field; a single text is one entry. Raises TypeError for values that protobuf would split
    into entries.
    """
    if isinstance(value, (*_BYTES, Mapping)):
        raise TypeError
    if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        return value
    return [_single(field, each) for each in ((value,) if isinstance(value, str) else value)]


def _single(field: FieldDescriptor, value: Any) -> Any:
    """The value. Raises TypeError if it is of another type that protobuf would convert silently."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        fits = isinstance(value, str)
    else:
        fits = isinstance(value, bool) == (field.cpp_type == FieldDescriptor.CPPTYPE_BOOL)
    if not fits:
        raise TypeError
    return value


_WANTED = {
    FieldDescriptor.CPPTYPE_STRING: "text that UTF-8 can encode",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
}


def _wanted(field: FieldDescriptor) -> str:
    """The allowed values of a field, in words."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return f"a mapping of {_wanted(kind.fields_by_name['key'])} to {_wanted(kind.fields_by_name['value'])}"
    one = _WANTED[field.cpp_type] if kind is None else f"a {kind.name}"
    # [] is the default of repeated fields in every version of protobuf.
    return f"a list with {one} in each place" if field.default_value == [] else one


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def list_blocks_request(
    state: types.BlockState | None, page_size: int, page_token: str
) -> operator_pb.ListBlocksRequest:
    """The request for a page of blocks. Raises InvalidRequest for an unknown state."""
    request = filled(operator_pb.ListBlocksRequest(), page_size=page_size, page_token=page_token)
    if state is not None:
        if state not in get_args(types.BlockState):
            raise InvalidRequest("state", f"must be one of {', '.join(get_args(types.BlockState))}, is {_shown(state)}")
        request.state = operator_pb.BlockState.Value(f"BLOCK_STATE_{state.upper()}")
    return request


def flat(cls: type[Values], message: Message, **given: Any) -> Values:
    """A dataclass instance with the fields of the message, by name; `given` fields are taken as they are.

    A nested message becomes the dataclass of its name, a repeated field a tuple, a map a dict, and a time a datetime in
    UTC. A time or an optional field that is not set becomes None. An enum value becomes its name in lower case without
    the prefix, or "unknown" if this client does not know it: later servers have more values.
    """
    for name, read in _readers(cls, message.DESCRIPTOR):
        if name not in given:
            given[name] = read(message)
    return cls(**given)


_CLASSES = vars(types) | vars(generation_types)


@cache
def _readers(cls: type[Any], descriptor: Descriptor) -> list[tuple[str, Callable[[Any], Any]]]:
    """For each field of `cls` that the message has: its name, and a function that reads it."""
    known = descriptor.fields_by_name
    return [(field.name, _reader(known[field.name])) for field in fields(cls) if field.name in known]


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    get, name = attrgetter(field.name), field.name
    # [] is the default of repeated fields in every version of protobuf.
    repeated = field.default_value == []
    if field.message_type is Timestamp.DESCRIPTOR:
        return lambda message: get(message).ToDatetime(UTC) if message.HasField(name) else None
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return lambda message: dict(get(message))
    if field.message_type is not None:
        kind = field.message_type.name
        made = _event if kind == "CacheEvent" else partial(flat, _CLASSES[kind])
        return lambda message: tuple(map(made, get(message))) if repeated else made(get(message))
    if field.enum_type is not None:
        names = _enum_names(field.enum_type)
        return lambda message: names.get(get(message), "unknown")
    if field.has_presence:
        return lambda message: get(message) if message.HasField(name) else None
    return (lambda message: tuple(get(message))) if repeated else get


def _enum_names(enum: EnumDescriptor) -> dict[int, str]:
    """Names of an enum's values in lower case, without their common prefix, and without UNSPECIFIED."""
    prefix = re.sub("(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return {value.number: value.name.removeprefix(f"{prefix}_").lower() for value in enum.values if value.number}


_EVENTS = {"stored": types.BlockStored, "removed": types.BlockRemoved, "cleared": types.TableCleared}


def _event(message: operator_pb.CacheEvent) -> types.Event:
    kind = message.WhichOneof("event")
    if kind is None:
        return types.UnknownEvent()
    event: types.Event = flat(_EVENTS[kind], getattr(message, kind))
    # The event is about a tier that this client does not know.
    return types.UnknownEvent() if getattr(event, "tier", "") == "unknown" else event
