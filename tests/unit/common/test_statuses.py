"""The one table from errors to gRPC statuses, and the details that go with each."""

from __future__ import annotations

from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pagekv.common import errors
from pagekv.common.errors import PageKVError
from pagekv.common.statuses import STATUS_TABLE, status_proto, status_row
from pagekv.v1.types_pb2 import ErrorReason

M = TypeVar("M", bound=Message)


def detail(status: status_pb2.Status, kind: type[M]) -> M:
    """The only detail of a kind."""
    (packed,) = (packed for packed in status.details if packed.Is(kind.DESCRIPTOR))
    found = kind()
    assert packed.Unpack(found)
    return found


def test_every_error_has_a_row_of_its_own() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PageKVError)}
    assert classes - {PageKVError} == STATUS_TABLE.keys()
    assert len({row.reason for row in STATUS_TABLE.values()}) == len(STATUS_TABLE)
    # The contract's enum is the one list of reasons.
    assert {row.reason for row in STATUS_TABLE.values()} == {*ErrorReason.keys()} - {"ERROR_REASON_UNSPECIFIED"}
    for cls, row in STATUS_TABLE.items():
        assert status_row(cls.__new__(cls)) is row, "a subclass must stand before its base"


def test_a_refused_field_is_in_the_details() -> None:
    status = status_proto(errors.InvalidRequest("text", "x" * 5000))
    assert (status.code, len(status.message)) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 1024)
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("text", "x" * 1024)


@pytest.mark.parametrize(
    "error", [errors.Overloaded("full", 0.25), errors.Unavailable("no", 0.25), errors.Draining("", 0.25)]
)
def test_a_delay_is_in_the_details(error: PageKVError) -> None:
    retry = detail(status_proto(error), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (errors.NotFound("none", "request", "r"), {}),
        (errors.InvalidRequest("step", "must be 2", "R1"), {"rule": "R1"}),
        (errors.InvalidRequest("text", "must be shorter"), {}),
        (errors.Overloaded("full", 1, limit=8, flag="--max-queue"), {"limit": "8", "flag": "--max-queue"}),
        (
            errors.LimitExceeded("pins", needed_blocks=3, available_blocks=0, pinned_blocks=5, limit=5, flag="--share"),
            {"needed_blocks": "3", "available_blocks": "0", "pinned_blocks": "5", "limit": "5", "flag": "--share"},
        ),
        (errors.LimitExceeded("pins", limit=16), {"limit": "16"}),
        (errors.Unavailable("no executor"), {}),
        (errors.Unavailable("no executor", server_version="0.1.0"), {"server_version": "0.1.0"}),
    ],
)
def test_facts_are_in_the_details(error: PageKVError, facts: dict[str, str]) -> None:
    info = detail(status_proto(error), error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("pagekv.v1", status_row(error).reason)
    assert dict(info.metadata) == facts


@pytest.mark.parametrize(
    "error", [errors.NotFound("x" * 5000, "request", "r"), errors.AlreadyExists("request_id", "used", "request", "r")]
)
def test_the_resource_is_in_the_details(error: PageKVError) -> None:
    resource = detail(status_proto(error), error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("request", "r")


def test_the_unmet_condition_is_in_the_details() -> None:
    status = status_proto(errors.FailedPrecondition("another drives it", "ATTACHED", "manager-1"))
    (violation,) = detail(status, error_details_pb2.PreconditionFailure).violations
    assert (violation.type, violation.subject, violation.description) == ("ATTACHED", "manager-1", "another drives it")
