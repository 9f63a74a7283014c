"""Parses large messages in slices, after counting what is in them.

A message of 4 MiB can have two million empty entries. A parser turns them into hundreds of megabytes and takes a
second, in which the event loop does nothing else. So one walk over the bytes counts fields and numbers, and ends at the
first entry beyond a bound. Long lists of numbers are given to the parser in pieces: protobuf appends the pieces of a
list (https://protobuf.dev/programming-guides/encoding/#last-one-wins).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pagekv.common.errors import InvalidRequest
from pagekv.common.unknown_fields import unknown_field
from pagekv.common.varint import varint

# Messages up to this size are parsed whole, in less than a millisecond whatever they contain.
SMALL_BYTES = 4 * 2**10
# Bytes given to the parser, bytes counted and fields walked through between two turns of the event loop.
SLICE_BYTES = 16 * 2**10
COUNTED_BYTES = 256 * 2**10
SLICE_FIELDS = 512
# Most fields of a message, including those of messages inside it. Every entry of a list counts, unless it is a number.
# A conversation of 4096 messages, with as many biases and stop strings as are allowed, has 15,500.
MAX_FIELDS = 16 * 2**10
# Most numbers in the lists of a message; the parser needs 16 MiB for them.
MAX_NUMBERS = 2 * 2**20
# Most bytes of one text: the bound of a prompt, which leaves room for the other fields of its message. The parser makes
# two copies of a text at once.
MAX_TEXT_BYTES = 4_000_000
# Most levels of messages inside messages, the bound of protobuf's own parsers.
MAX_DEPTH = 100

_VARINT, _LENGTH = 0, 2
# Bytes by wire type.
_FIXED = {1: 8, 5: 4}
_FIXED_KINDS = {0: _VARINT} | {size: kind for kind, size in _FIXED.items()}
_VARINT_BYTES = 10
# Bytes of a varint that are not its last byte.
_CONTINUED = bytes(range(0x80, 0x100))
_NO_NUMBERS = (
    FieldDescriptor.TYPE_STRING,
    FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_MESSAGE,
    FieldDescriptor.TYPE_GROUP,
)
_FIXED_BYTES = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a message. `fields`: most fields in all. `lists`: by the full name of a list of numbers, its own bound
    and the rule of the step contract that sets it. `numbers`: most numbers in all other lists together.
    """

    fields: int = MAX_FIELDS
    numbers: int = MAX_NUMBERS
    lists: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # The rule of the step contract that an unknown field breaks.
    unknown_rule: str = ""


class _Field(NamedTuple):
    name: str
    full_name: str
    repeated: bool
    # The type of the messages, or of a map's entries; None for other fields.
    message: Descriptor | None
    is_map: bool
    # Whether the value is a message or a list of numbers; and the bytes of each number, 0 for varints.
    inside: bool
    number_bytes: int
    # Wire types that the parser accepts for the field.
    kinds: tuple[int, ...]


class _Path(NamedTuple):
    """The place of a message: an entry of a field of the message around it. Written out only for errors."""

    outer: _Path | None
    field: _Field | None
    entry: int
    depth: int

    def prefix(self) -> str:
        """Path of the message, with a dot at its end, before a field's name; "" for the outermost message."""
        if self.outer is None or self.field is None:
            return ""
        entry = f"[{self.entry}]" if self.field.repeated else ""
        return f"{self.outer.prefix()}{self.field.name}{entry}."


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    fields = {}
    for found in descriptor.fields:
        # [] is the default of repeated fields in every version of protobuf.
        repeated, message = found.default_value == [], found.message_type
        is_map = message is not None and message.GetOptions().map_entry
        inside = message is not None or (repeated and found.type not in _NO_NUMBERS)
        number_bytes, packed = _FIXED_BYTES.get(found.type, 0), inside and message is None
        kind = _LENGTH if found.type in _NO_NUMBERS else _FIXED_KINDS[number_bytes]
        fields[found.number] = _Field(
            found.name,
            found.full_name,
            repeated or is_map,
            message,
            is_map,
            inside,
            number_bytes,
            (kind, _LENGTH) if packed else (kind,),
        )
    return fields


async def read_large(message: Message, data: bytes, bounds: Bounds) -> None:
    """Parses `data` into the empty `message`; the event loop gets a turn after each slice. Raises as `parse_slices`
    does.
    """
    # gRPC has already copied the message in this turn of the loop.
    await asyncio.sleep(0)
    for _ in parse_slices(message, data, bounds):
        await asyncio.sleep(0)


def parse_slices(message: Message, data: bytes, bounds: Bounds) -> Iterator[None]:
    """Parses `data` into the empty `message` and yields after each slice. At the first yield the message has the fields
    at the beginning of `data`. Raises InvalidRequest if a bound is exceeded or a field is unknown, and DecodeError for
    bytes that are no message.
    """
    # Any: the type stubs know two classes of descriptors.
    descriptor: Any = message.DESCRIPTOR
    return _Walk(data, bounds).records(message, descriptor, _Path(None, None, 0, 1), 0, len(data))


class _Walk:
    """One pass over one message."""

    def __init__(self, data: bytes, bounds: Bounds) -> None:
        self._data = data
        self._bounds = bounds
        self._num_fields = 0
        # Numbers by the path of their list; under "" those of lists without a bound of their own.
        self._lengths: Counter[str] = Counter()

    def records(
        self, into: Message | None, descriptor: Descriptor, path: _Path, start: int, end: int
    ) -> Iterator[None]:
        """Walks over the fields of one message, the bytes from `start` to `end`, and parses them into `into`. If that
        is None, the fields are only counted, because they are parsed together with the bytes around them.
        """
        data, known, most = self._data, _fields(descriptor), self._bounds.fields
        entries: dict[str, int] = {}
        parsed = pos = start
        while pos < end:
            begin = pos
            # Most tags and lengths have one byte.
            tag = data[pos]
            pos += 1
            if tag > 0x7F:
                tag, pos = self._varint(begin, end)
            kind, body = tag & 7, pos
            if kind == _LENGTH:
                size, body = (data[pos], pos + 1) if pos < end and data[pos] < 0x80 else self._varint(pos, end)
                pos = body + size
            elif kind == _VARINT:
                _, pos = self._varint(pos, end)
            elif kind in _FIXED:
                pos += _FIXED[kind]
            else:
                raise DecodeError(f"no field of this contract has wire type {kind}")
            if pos > end:
                raise DecodeError("a field is longer than its message")
            found = known.get(tag >> 3)
            if found is None or kind not in found.kinds:
                raise unknown_field(path.prefix(), tag >> 3, descriptor.name, self._bounds.unknown_rule)
            self._num_fields += 1
            if self._num_fields % SLICE_FIELDS == 0:
                yield
            if self._num_fields > most:
                what = f"at most {most} fields and list entries in all, not counting numbers in packed lists"
                raise InvalidRequest(path.prefix() + found.name, f"a message must have {what}; this one has more")
            if kind == _LENGTH and not found.inside and size > MAX_TEXT_BYTES:
                words = f"must be at most {MAX_TEXT_BYTES} bytes, has {size}"
                raise InvalidRequest(path.prefix() + found.name, words)
            if kind == _LENGTH and found.inside:
                alone = into is not None and size > SLICE_BYTES and not found.is_map
                if into is not None and alone:
                    into.MergeFromString(data[parsed:begin])
                    parsed = pos
                if found.message is not None:
                    entry = entries.get(found.name, 0)
                    inner = _Path(path, found, entry, path.depth + 1)
                    if inner.depth > MAX_DEPTH:
                        raise DecodeError(f"messages are nested more than {MAX_DEPTH} deep")
                    entries[found.name] = entry + 1
                    child = _child(into, found) if into is not None and alone else None
                    yield from self.records(child, found.message, inner, body, pos)
                else:
                    yield from self._count_numbers(path, found, body, pos)
                    if into is not None and alone:
                        yield from self._parse_numbers(into, tag, found.number_bytes, body, pos)
            if into is not None and pos - parsed > SLICE_BYTES:
                into.MergeFromString(data[parsed:pos])
                parsed = pos
                yield
        if into is not None:
            into.MergeFromString(data[parsed:end])

    def _count_numbers(self, path: _Path, found: _Field, start: int, end: int) -> Iterator[None]:
        """Counts the numbers of a list, or of a part of one."""
        count = 0
        for at in range(start, end, COUNTED_BYTES):
            piece = self._data[at : min(end, at + COUNTED_BYTES)]
            count += len(piece) // found.number_bytes if found.number_bytes else len(piece.translate(None, _CONTINUED))
            if end - start > COUNTED_BYTES:
                yield
        own = self._bounds.lists.get(found.full_name)
        most, rule = own or (self._bounds.numbers, "")
        total = path.prefix() + found.name if own else ""
        self._lengths[total] += count
        if self._lengths[total] > most:
            raise InvalidRequest(
                path.prefix() + found.name, f"must have at most {most} entries, has {self._lengths[total]}", rule
            )

    def _parse_numbers(self, into: Message, tag: int, number_bytes: int, start: int, end: int) -> Iterator[None]:
        data = self._data
        while start < end:
            stop = min(end, start + (SLICE_BYTES // 8 * 8))
            # No cut within a varint. A varint that is too long is left to the parser, which refuses it.
            while not number_bytes and stop < end and data[stop - 1] & 0x80 and stop > start + _VARINT_BYTES:
                stop -= 1
            into.MergeFromString(varint(tag) + varint(stop - start) + data[start:stop])
            start = stop
            yield

    def _varint(self, pos: int, end: int) -> tuple[int, int]:
        """The varint at a position, and the position after it."""
        value = shift = 0
        for at in range(pos, min(end, pos + _VARINT_BYTES)):
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at + 1
            shift += 7
        raise DecodeError("a number does not end")


def _child(into: Message, found: _Field) -> Message:
    """The message inside `into` that a field's value is to be parsed into."""
    child: Message = getattr(into, found.name)
    if found.repeated:
        return child.add()  # type: ignore[attr-defined,no-any-return]  # a list of messages
    child.SetInParent()
    return child
