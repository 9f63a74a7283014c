"""Messages changed at random: one field of a message set to something else, or the bytes of its encoding damaged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagekv.common.varint import varint

WHOLE = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 2**31 - 1, 2**31, 2**32 - 1]
REAL = [0.0, -0.0, 1e-45, 0.5, 1.0, 1.0000001, 2.0, -2.0, 10.0, 100.0, 100.1, -1e38, 3e38, float("nan"), float("inf")]
TEXTS = [
    "",
    " ",
    "\0",
    "a",
    "x" * 129,
    "ä" * 257,
    "\U0001f600" * 40,
    "../..",
    "%n%s{}{0}",
    "\n\r\t",
    "\u202e\ufeff",
    "0" * 5000,
]
LENGTHS = [1, 1, 1, 2, 70, 1100]


def scalar(rng: random.Random, field: Any, numbers: Sequence[int] = WHOLE) -> Any:
    """A value for a field that is no message, as often as not beyond the field's bounds; whole numbers are of
    `numbers`, with those that only 64 bits hold.
    """
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(REAL)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([0, 1, 2, 3, 4, -1])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    number = rng.choice([*numbers, rng.randrange(40)])
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return rng.choice([number, 2**63, 2**64 - 1])
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return rng.choice([-1, min(number, 2**31 - 1), -(2**31)])
    return number


def mutate(rng: random.Random, message: Message, numbers: Sequence[int] = WHOLE) -> None:
    """Changes one field somewhere in the message; a message without fields stays as it is."""
    # Any: the type stubs know two classes of descriptors.
    fields: Any = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    value: Any = getattr(message, field.name)
    # [] is the default of repeated fields in every version of protobuf.
    if field.default_value == []:
        _mutate_list(rng, field, value, numbers)
    elif not isinstance(value, Message):
        setattr(message, field.name, scalar(rng, field, numbers))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        mutate(rng, value, numbers)


def _mutate_list(rng: random.Random, field: Any, value: Any, numbers: Sequence[int]) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        if inner.fields_by_name["value"].message_type is None:
            entries = range(rng.choice(LENGTHS))
            value.update({_entry(rng, inner, "key", numbers): _entry(rng, inner, "value", numbers) for _ in entries})
        return
    action = rng.randrange(4)
    if action == 0 and len(value):
        del value[rng.randrange(len(value))]
    elif action == 1 and len(value) and inner is None:
        value[rng.randrange(len(value))] = scalar(rng, field, numbers)
    elif action == 2 and len(value):
        value.append(value[rng.randrange(len(value))])
    elif inner is not None:
        mutate(rng, value[rng.randrange(len(value))] if len(value) and rng.random() < 0.8 else value.add(), numbers)
    else:
        value.extend(scalar(rng, field, numbers) for _ in range(rng.choice(LENGTHS)))


def _entry(rng: random.Random, entry: Any, name: str, numbers: Sequence[int]) -> Any:
    return scalar(rng, entry.fields_by_name[name], numbers)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut off somewhere, or with one bit turned over."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def field_bytes(number: int, value: bytes) -> bytes:
    """A field that has a length, encoded."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def hostile(rng: random.Random, data: bytes, descriptor: Any, most: int) -> bytes:
    """An encoding, `data`, of a message of this type, made into bytes that few writers of protobuf make: of at most
    `most` bytes, where `data` has no more.
    """
    fields = list(descriptor.fields)
    numbers = [field.number for field in fields] or [1]
    number = rng.choice(numbers)
    match rng.randrange(8):
        case 0:
            made = rng.randbytes(rng.choice([1, 3, 20, 300, 5000]))
        case 1 if data:
            made = damaged(rng, data)
        case 2:  # a field that nobody knows
            unknown = rng.choice([n for n in (18, 99, 536870911) if n not in numbers])
            made = data + rng.choice([field_bytes(unknown, b"x"), varint(unknown << 3) + b"\1"])
        case 3:  # no UTF-8, or a field of another wire type
            made = data + field_bytes(number, b"\xff\xfe\x80")
        case 4:  # messages in messages, or groups, which proto3 has not
            depth = rng.choice([50, 99, 101, 2000])
            made = data + (_nested(number, depth) if rng.random() < 0.5 else varint(number << 3 | 3) * depth)
        case 5:  # one entry as often as fits
            entry = field_bytes(number, rng.choice([b"", b"x", data[:200]]))
            made = data + entry * ((most - len(data)) // len(entry))
        case 6:  # a list of numbers, packed
            made = data + field_bytes(number, rng.choice([b"\0", b"\xff\xff\x03", b"\x80"]) * ((most - len(data)) // 4))
        case _:  # read one behind the other
            made = data * 2
    return made[: max(most, len(data))]


def _nested(number: int, depth: int) -> bytes:
    """Messages, each in a field of this number of the one before."""
    made = b""
    for _ in range(depth):
        made = field_bytes(number, made)
    return made
