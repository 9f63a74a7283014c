"""The present contract beside the one before it: no number has come to mean something else."""

from __future__ import annotations

from importlib import import_module

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from support.clients import old_contract

FILES = (
    "v1.types_pb2",
    "v1.inference_service_pb2",
    "v1.cache_service_pb2",
    "v1.operator_service_pb2",
    "steps.v1.executor_service_pb2",
)
# Kinds of a prompt, which had a place in each request.
GONE = {"pagekv.v1.TokenizedInput", "pagekv.v1.ChatInput"}


def present() -> dict[str, Descriptor]:
    """Every message of the present contract, steps by the name that they had when they were in pagekv.v1."""
    files = [import_module(f"pagekv.{name}").DESCRIPTOR for name in FILES]
    return {f"pagekv.v1.{name}": message for file in files for name, message in file.message_types_by_name.items()}


PRESENT, OLD = present(), old_contract.messages()


def shape(field: FieldDescriptor) -> tuple[object, ...]:
    """All that the bytes of a field depend on."""
    named: Descriptor | EnumDescriptor | None = field.message_type or field.enum_type
    return field.type, field.default_value == [], named.name if named is not None else ""


def reserved(message: Descriptor) -> set[int]:
    """Numbers that a message keeps for nothing."""
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return {number for taken in proto.reserved_range for number in range(taken.start, taken.end)}


def test_no_message_has_gone_but_those_that_are_named() -> None:
    assert OLD.keys() - PRESENT.keys() == GONE
    assert len(OLD) == 58


@pytest.mark.parametrize("name", sorted(OLD.keys() - GONE))
def test_a_number_means_what_it_meant_or_nothing(name: str) -> None:
    message = PRESENT[name]
    for field in OLD[name].fields:
        now = message.fields_by_number.get(field.number)
        if now is None:
            assert field.number in reserved(message), f"{field.name} = {field.number} may come back as something else"
        else:
            assert shape(now) == shape(field), f"{field.name} = {field.number}"


def test_a_value_of_an_enum_means_what_it_meant() -> None:
    files = [import_module(f"pagekv.{name}").DESCRIPTOR for name in FILES]
    enums = {name: enum for file in files for name, enum in file.enum_types_by_name.items()}
    for file in old_contract.files():
        for name, enum in file.enum_types_by_name.items():
            was = {value.name: value.number for value in enum.values}
            assert was.items() <= {value.name: value.number for value in enums[name].values}.items()
