"""A server that is newer than the client: what the client does not know costs no answer and no resume."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from support.clients.scripted_server import LOST, Fails, ScriptedServer, chunk, complete

import pagekv.v1
from pagekv.client import (
    AlreadyExists,
    BlockStored,
    Completion,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Overloaded,
    PageKVClient,
    PageKVError,
    PermissionDenied,
    ServerError,
    TableReplica,
    Unauthenticated,
    Unavailable,
    UnknownEvent,
    types,
    wire,
)
from pagekv.client.errors import from_rpc_error
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

# Any: of no enum.
LATER: Any = 42
# Dataclasses that are called otherwise than their messages.
CLASSES = {"GenerateComplete": Completion}
GIVEN = {"request_id": "r", "token_ids": ()}


def enum_fields() -> Iterator[tuple[Descriptor, str, str]]:
    """Every field of the contract that is an enum, but those of requests: its message, its name, the enum."""
    for path in sorted(Path(pagekv.v1.__path__[0]).glob("*_pb2.py")):
        for message in import_module(f"pagekv.v1.{path.stem}").DESCRIPTOR.message_types_by_name.values():
            if not message.name.endswith("Request"):
                yield from ((message, each.name, each.enum_type.name) for each in message.fields if each.enum_type)


ENUM_FIELDS = {f"{message.name}.{name}": (message, name, enum) for message, name, enum in enum_fields()}


def test_every_enum_of_an_answer_is_fed() -> None:
    assert {enum for _, _, enum in ENUM_FIELDS.values()} >= {"FinishReason", "BlockState", "BlockOutcome", "Tier"}


@pytest.mark.parametrize("number", [0, LATER])
@pytest.mark.parametrize("path", ENUM_FIELDS)
def test_a_value_of_an_enum_that_is_not_known_is_called_so(path: str, number: int) -> None:
    descriptor, name, _ = ENUM_FIELDS[path]
    message = GetMessageClass(descriptor)()
    setattr(message, name, number)
    message = type(message).FromString(message.SerializeToString())
    cls: Any = CLASSES.get(descriptor.name) or getattr(types, descriptor.name)
    given = GIVEN if cls is Completion else {}
    assert getattr(wire.flat(cls, message, **given), name) == "unknown"


def test_an_answer_that_ends_for_an_unknown_reason_is_whole(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), complete(4, reason=LATER))
    end = client.generate("x")
    assert (end.token_ids, end.finish_reason) == ((4,), "unknown")


def test_a_health_that_is_not_known(server: ScriptedServer, client: PageKVClient) -> None:
    answer = health_pb2.HealthCheckResponse.FromString(b"\x08\x2a")
    assert answer.status == LATER
    server.expect("Check", answer)
    assert client.health() == "unknown"


def test_an_event_that_is_not_known_is_left_out(server: ScriptedServer, client: PageKVClient) -> None:
    queued = pb.GenerateResponse.FromString(pb.GenerateResponse(request_id="req").SerializeToString() + b"\x9a\x06\x00")
    assert (queued.WhichOneof("event"), queued.ByteSize()) == (None, 8)
    server.expect("Generate", queued, chunk(4, cached=2), queued, chunk(5, done=1), complete(4, 5, cached=2))
    stream = client.stream("x")
    assert [each.token_ids for each in stream] == [(4,), (5,), ()]
    end = stream.completion
    assert (end.token_ids, end.prompt_tokens, end.cached_tokens) == ((4, 5), 3, 2)


def test_a_change_that_is_not_known_is_said_and_ends_a_replica(server: ScriptedServer, client: PageKVClient) -> None:
    known = operator_pb.CacheEvent(stored=operator_pb.BlockStored(block_hash="a", tier=types_pb2.TIER_DEVICE))
    tier = operator_pb.CacheEvent(removed=operator_pb.BlockRemoved(block_hash="a", tier=LATER))
    for change in (operator_pb.CacheEvent.FromString(b"\x9a\x06\x00"), tier):
        message = operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[known, change])
        server.expect("WatchEvents", message)
        (batch,) = client.watch_events()
        stored = BlockStored(block_hash="a", parent_hash="", token_ids=(), tier="device")
        assert batch.events == (stored, UnknownEvent())
        with pytest.raises(ValueError, match="unknown to this client: update the client"):
            TableReplica().apply(batch)


class Refusal(grpc.RpcError):
    """A failed call as stubs raise it."""

    def __init__(self, code: grpc.StatusCode, *details: Any) -> None:
        super().__init__()
        self._code = code
        status = status_pb2.Status()
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        self._trailing = ((STATUS_DETAILS_KEY, status.SerializeToString()),) if details else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "words"

    def trailing_metadata(self) -> Any:
        return self._trailing


INFO = error_details_pb2.ErrorInfo(domain="pagekv.v1", reason="INVENTED_LATER", metadata={"limit": "many", "new": "1"})
CODE = grpc.StatusCode
BY_CODE: dict[grpc.StatusCode, type[PageKVError]] = {
    CODE.INVALID_ARGUMENT: InvalidRequest,
    CODE.ALREADY_EXISTS: AlreadyExists,
    CODE.NOT_FOUND: NotFound,
    CODE.RESOURCE_EXHAUSTED: LimitExceeded,
    CODE.FAILED_PRECONDITION: FailedPrecondition,
    CODE.UNAVAILABLE: Unavailable,
    CODE.UNAUTHENTICATED: Unauthenticated,
    CODE.PERMISSION_DENIED: PermissionDenied,
    CODE.DEADLINE_EXCEEDED: DeadlineExceeded,
}
ERRORS = sorted(set(CODE) - {CODE.OK}, key=lambda code: code.name)


@pytest.mark.parametrize("code", ERRORS)
def test_an_unknown_reason_is_told_by_its_code(code: grpc.StatusCode) -> None:
    error = from_rpc_error(Refusal(code, INFO), "there")
    assert type(error) is BY_CODE.get(code, ServerError)
    assert code is CODE.DEADLINE_EXCEEDED or "words" in str(error)
    if isinstance(error, ServerError):
        assert error.code == code.name


@pytest.mark.parametrize("code", ERRORS)
def test_a_status_without_a_reason_is_told_by_its_code(code: grpc.StatusCode) -> None:
    """A proxy's, or gRPC's own."""
    broken = {CODE.UNAVAILABLE: ConnectionLost, CODE.CANCELLED: ConnectionLost}
    foreign = error_details_pb2.ErrorInfo(domain="proxy.example", reason="NOT_SERVING")
    for details in ((), (foreign,)):
        assert type(from_rpc_error(Refusal(code, *details), "there")) is {**BY_CODE, **broken}.get(code, ServerError)


def test_the_details_of_an_unknown_reason_are_kept() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="guide", description="must be shorter")
    error = from_rpc_error(
        Refusal(CODE.INVALID_ARGUMENT, INFO, error_details_pb2.BadRequest(field_violations=[violation])), "there"
    )
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.description) == ("guide", "must be shorter")
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=7))
    for code, cls in ((CODE.RESOURCE_EXHAUSTED, Overloaded), (CODE.UNAVAILABLE, Unavailable)):
        late = from_rpc_error(Refusal(code, INFO, retry), "there")
        assert (type(late), getattr(late, "retry_delay_s", None)) == (cls, 7)


class Later(PageKVError):
    """Known to later servers alone."""


def test_a_stream_that_an_unknown_reason_broke_is_resumed(
    server: ScriptedServer, client: PageKVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_pb2.Status(message="moving")
    status.details.add().Pack(INFO)
    monkeypatch.setattr("support.clients.scripted_server.status_row", lambda _: Row())
    monkeypatch.setattr("support.clients.scripted_server.status_proto", lambda _: status)
    server.expect("Generate", chunk(4), Fails(Later("moving")))
    server.expect("Generate", chunk(5, done=1), complete(5, resumed=1))
    end = client.generate([1, 2, 3])
    assert (end.token_ids, end.resumes) == ((4, 5), 1)


class Row:
    """A row of a later server's table."""

    code = LOST
