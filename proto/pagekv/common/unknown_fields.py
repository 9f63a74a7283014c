"""Refuses fields that this version of the contract does not know, because ignoring a field could change the answer."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pagekv.common.errors import InvalidRequest


def check_known(message: Message, rule: str = "") -> None:
    """Raises InvalidRequest, with this rule, if the message or a message inside it has an unknown field. The error's
    `field` is the path, with the field's number as its name: "sampling_params.42".
    """
    found = _unknown(message, _parts(message.DESCRIPTOR))
    if found is not None:
        raise unknown_field(*found, rule)


def unknown_field(path: str, number: int, name: str, rule: str) -> InvalidRequest:
    """The error for the unknown field `number` of a message; `name` is the message's type, `path` its place."""
    what = f"this version of the contract has no field {number} of {name}"
    return InvalidRequest(f"{path}{number}", f"must be absent: {what}", rule)


class _Part(NamedTuple):
    """A field whose value is a message or a list of messages."""

    name: str
    repeated: bool
    parts: tuple[_Part, ...]


@cache
def _parts(descriptor: Descriptor) -> tuple[_Part, ...]:
    # [] is the default of repeated fields in every version of protobuf. Maps of the contract hold no messages.
    return tuple(
        _Part(field.name, field.default_value == [], _parts(field.message_type))
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )


def _unknown(message: Message, parts: tuple[_Part, ...]) -> tuple[str, int, str] | None:
    """Path of the first message that has an unknown field, the field's number and the message's name."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return "", unknown[0].field_number, message.DESCRIPTOR.name
    for name, repeated, inner in parts:
        if repeated:
            for index, each in enumerate(getattr(message, name)):
                if (found := _unknown(each, inner)) is not None:
                    return f"{name}[{index}].{found[0]}", *found[1:]
        elif message.HasField(name) and (found := _unknown(getattr(message, name), inner)) is not None:
            return f"{name}.{found[0]}", *found[1:]
    return None
