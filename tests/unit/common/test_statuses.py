"""The one table from errors to gRPC statuses, and the details that go with each."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagekv.common import errors
from pagekv.common.errors import PageKVError
from pagekv.common.statuses import STATUS_TABLE, status_proto, status_row


def detail(status: status_pb2.Status, kind: type) -> object:
    """The first detail of a kind; None without one."""
    for packed in status.details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def test_every_error_has_a_row_of_its_own() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PageKVError)}
    assert classes - {PageKVError} == STATUS_TABLE.keys()
    assert len({row.reason for row in STATUS_TABLE.values()}) == len(STATUS_TABLE)
    for cls, row in STATUS_TABLE.items():
        assert status_row(cls.__new__(cls)) is row, "a subclass must stand before its base"


def test_a_refused_field_is_in_the_details() -> None:
    status = status_proto(errors.InvalidRequest("text", "x" * 5000))
    assert (status.code, len(status.message)) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 1024)
    request = detail(status, error_details_pb2.BadRequest)
    assert isinstance(request, error_details_pb2.BadRequest)
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("text", "x" * 1024)


@pytest.mark.parametrize("error", [errors.Overloaded("full", 0.25), errors.Unavailable("draining", 0.25)])
def test_a_delay_is_in_the_details(error: PageKVError) -> None:
    retry = detail(status_proto(error), error_details_pb2.RetryInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250
