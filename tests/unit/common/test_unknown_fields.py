"""Nothing of a request is ignored in silence, on any service, at any depth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from pagekv.common.errors import InvalidRequest
from pagekv.common.server import GrpcServer
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.common.unknown_fields import check_known
from pagekv.v1 import inference_service_pb2 as pb

FILES = {
    "pagekv.v1": ("inference_service", "cache_service", "operator_service"),
    "pagekv.steps.v1": ("executor_service",),
}
# A varint field of number 15000.
UNKNOWN = b"\xc0\xa9\x07\x01"


def services() -> Iterator[tuple[ServiceDescriptor, Any]]:
    for package, names in FILES.items():
        for name in names:
            stubs = import_module(f"{package}.{name}_pb2_grpc")
            for service in import_module(f"{package}.{name}_pb2").DESCRIPTOR.services_by_name.values():
                yield service, stubs


def places(message: Descriptor, path: str = "") -> Iterator[str]:
    """Paths of a message and of every message inside, each with the full stop that a field's name would follow."""
    yield path
    for field in message.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from places(inner, f"{path}{field.name}{'[1]' if repeated(field) else ''}.")


def repeated(field: FieldDescriptor) -> bool:
    return bool(field.default_value == [])


def bent(message: Descriptor, path: str) -> Message:
    """An empty message but for an unknown field in the message at a place; lists on the way have two entries."""
    cls = GetMessageClass(message)
    if not path:
        return cls.FromString(UNKNOWN)
    made = cls()
    name, _, rest = path.partition(".")
    field = message.fields_by_name[name.removesuffix("[1]")]
    assert field.message_type is not None
    inner = bent(field.message_type, rest)
    if repeated(field):
        getattr(made, field.name).add()
        getattr(made, field.name).append(inner)
    else:
        getattr(made, field.name).CopyFrom(inner)
    return made


METHODS = {method.full_name: method for service, _ in services() for method in service.methods}
PLACES = [(name, path) for name, method in METHODS.items() for path in places(method.input_type)]


def test_the_walk_finds_the_services_and_what_is_inside() -> None:
    assert {service.name for service, _ in services()} == {
        "InferenceService", "CacheService", "OperatorService", "ExecutorService",
    }  # fmt: skip  # one line
    assert ("pagekv.v1.InferenceService.Generate", "prompt.chat.messages[1].") in PLACES
    assert ("pagekv.steps.v1.ExecutorService.Run", "new_seqs[1].sampling.") in PLACES


@pytest.mark.parametrize(("method", "path"), PLACES)
def test_an_unknown_field_is_refused_by_number_and_place(method: str, path: str) -> None:
    request = METHODS[method].input_type
    message = bent(request, path)
    with pytest.raises(InvalidRequest, match=r"has no field 15000 of [A-Z]") as caught:
        check_known(message, "R35")
    assert (caught.value.field, caught.value.rule) == (f"{path}15000", "R35")
    message.DiscardUnknownFields()
    check_known(message)


def test_every_call_refuses_before_its_handler_sees_the_request() -> None:
    """Run apart, whose requests are a stream: its handler reads them with the same function."""

    async def main() -> list[str]:
        server = GrpcServer("127.0.0.1:0", [], reflection=False)
        for service, stubs in services():
            # Servicers that serve nothing: UNIMPLEMENTED is what a good request gets.
            getattr(stubs, f"add_{service.name}Servicer_to_server")(
                getattr(stubs, f"{service.name}Servicer")(), server.server
            )
        port = await server.start()
        refused = []
        try:
            # Any: the type stubs know a channel by the messages of generated code.
            channel: Any
            async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for service, _ in services():
                    for method in service.methods:
                        if method.client_streaming:
                            continue
                        call = channel.unary_stream if method.server_streaming else channel.unary_unary
                        path = f"/{service.full_name}/{method.name}"
                        for sent, words, field in (
                            (UNKNOWN, "has no field 15000", "15000"),
                            (b"\xff", f"must be the message of {path}, but its bytes cannot be read", ""),
                        ):
                            begun = call(path)(sent)
                            assert await begun.code() is grpc.StatusCode.INVALID_ARGUMENT
                            assert words in await begun.details()
                            trailers = dict(await begun.trailing_metadata())
                            status = status_pb2.Status.FromString(trailers[STATUS_DETAILS_KEY])
                            request = error_details_pb2.BadRequest()
                            assert status.details[1].Unpack(request)
                            assert [violation.field for violation in request.field_violations] == [field]
                        refused.append(method.full_name)
        finally:
            await server.stop(0)
        return refused

    assert {*METHODS} - {*asyncio.run(main())} == {"pagekv.steps.v1.ExecutorService.Run"}


def test_what_is_known_passes_whatever_its_value() -> None:
    """Values of enums that are not known are the handler's to refuse: they are no unknown fields."""
    request = pb.GenerateRequest(request_id="r")
    request.sampling_params.logit_bias[3] = 1.0
    request.prompt.chat.messages.add(role="user")
    check_known(request)
