"""Large messages: counted before they are parsed, and parsed in slices.

A message of 4 MiB can have two million empty entries, which a parser turns into hundreds of megabytes in a second
during which the event loop does nothing else. So fields and numbers are counted while a message is walked through,
and the walk ends at the first entry too many. Long lists of numbers are given to the parser piece by piece: protobuf
appends what comes in pieces (https://protobuf.dev/programming-guides/encoding/#last-one-wins).
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

# Messages up to this size are parsed whole, in less than a millisecond whatever they have.
SMALL_BYTES = 4 * 2**10
# Bytes given to the parser, bytes counted and fields walked through between two turns of the event loop.
SLICE_BYTES = 16 * 2**10
COUNTED_BYTES = 256 * 2**10
SLICE_FIELDS = 512
# Fields that a message may have, with those of the messages inside it; every entry of a list counts, unless it is a
# number. A conversation of 4096 messages beside as many biases and stops as there may be has 15,500.
MAX_FIELDS = 16 * 2**10
# Numbers that the lists of a message may have; the parser takes 16 MiB for them.
MAX_NUMBERS = 2 * 2**20
# Bytes of one text, which leave room for the rest of its message: the parser makes two copies at once. No field may
# have more than a prompt.
MAX_TEXT_BYTES = 4_000_000
# Messages inside messages, as the parsers of protobuf have it.
MAX_DEPTH = 100

_VARINT, _LENGTH = 0, 2
# Bytes by wire type.
_FIXED = {1: 8, 5: 4}
_FIXED_KINDS = {0: _VARINT} | {size: kind for kind, size in _FIXED.items()}
_VARINT_BYTES = 10
# Bytes behind which a varint goes on.
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
    """Bounds of a message: fields in all, and numbers in all lists but those of `lists`, which have a bound each,
    by the full name of the field and with the rule of the step contract that it belongs to.
    """

    fields: int = MAX_FIELDS
    numbers: int = MAX_NUMBERS
    lists: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # The rule that a field breaks which is not known here.
    unknown_rule: str = ""


class _Field(NamedTuple):
    name: str
    full_name: str
    repeated: bool
    # Of a field of messages, entries of maps among them.
    message: Descriptor | None
    is_map: bool
    # Whether the value is a message or a list of numbers; and the bytes of each number, 0 for varints.
    inside: bool
    number_bytes: int
    # Wire types that the parser takes for it.
    kinds: tuple[int, ...]


class _Path(NamedTuple):
    """Where a message stands: in an entry of a field of another. Made into words for errors alone."""

    outer: _Path | None
    field: _Field | None
    entry: int
    depth: int

    def prefix(self) -> str:
        """Path of the message, with the full stop that a field's name follows; "" for the outermost."""
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
    """Parses `data` into the empty `message`, with a turn of the event loop behind each slice. Raises what
    `parse_slices` does.
    """
    # gRPC has copied the message in this turn.
    await asyncio.sleep(0)
    for _ in parse_slices(message, data, bounds):
        await asyncio.sleep(0)


def parse_slices(message: Message, data: bytes, bounds: Bounds) -> Iterator[None]:
    """Parses `data` into the empty `message`, yielding behind each slice. At the first yield the message has the fields
    that stand first in `data`. Raises InvalidRequest beyond a bound or where a field is not known, and DecodeError for
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
        """Walks through the fields of one message, which stand from `start` to `end`, and parses them `into` a message;
        None: they are only counted, and parsed with what is around them.
        """
        data, known, most = self._data, _fields(descriptor), self._bounds.fields
        entries: dict[str, int] = {}
        parsed = pos = start
        while pos < end:
            begin = pos
            # Most tags and lengths are of one byte.
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
                raise DecodeError("a field ends behind its message")
            found = known.get(tag >> 3)
            if found is None or kind not in found.kinds:
                raise unknown_field(path.prefix(), tag >> 3, descriptor.name, self._bounds.unknown_rule)
            self._num_fields += 1
            if self._num_fields % SLICE_FIELDS == 0:
                yield
            if self._num_fields > most:
                what = f"at most {most} fields and entries of lists in all, numbers in packed lists not counted"
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
            # Not within a varint. One that is too long is left to the parser, which refuses it.
            while not number_bytes and stop < end and data[stop - 1] & 0x80 and stop > start + _VARINT_BYTES:
                stop -= 1
            into.MergeFromString(varint(tag) + varint(stop - start) + data[start:stop])
            start = stop
            yield

    def _varint(self, pos: int, end: int) -> tuple[int, int]:
        """A number, and the position behind it."""
        value = shift = 0
        for at in range(pos, min(end, pos + _VARINT_BYTES)):
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at + 1
            shift += 7
        raise DecodeError("a number has no end")


def _child(into: Message, found: _Field) -> Message:
    """The message inside `into` that a field's value is to be parsed into."""
    child: Message = getattr(into, found.name)
    if found.repeated:
        return child.add()  # type: ignore[attr-defined,no-any-return]  # a list of messages
    child.SetInParent()
    return child
