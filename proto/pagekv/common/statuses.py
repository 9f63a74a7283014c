"""The table from errors to gRPC statuses, and the statuses' google.rpc details.

Servers raise `pagekv.common.errors` anywhere below a handler, and `pagekv.common.server.ErrorInterceptor` turns them
into statuses with this table. Clients use the same table to turn statuses into errors (`pagekv.client.errors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from pagekv.common import errors

# ErrorInfo.domain: domain and reason together are unique among the errors of all services on a call's way.
ERROR_DOMAIN = "pagekv.v1"
# Trailing metadata key that gRPC reserves for a serialised google.rpc.Status.
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# Most characters of each text in a status.
MAX_CHARACTERS = 1024


class StatusRow(NamedTuple):
    """Status code and reason of one exception class."""

    code: grpc.StatusCode
    reason: str


# Reasons are the names of `ErrorReason` in types.proto. Subclasses stand before their bases: the first match wins.
STATUS_TABLE: dict[type[errors.PageKVError], StatusRow] = {
    errors.AlreadyExists: StatusRow(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
    errors.InvalidRequest: StatusRow(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.NotFound: StatusRow(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    errors.Overloaded: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.LimitExceeded: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"),
    errors.OutOfMemory: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"),
    errors.Draining: StatusRow(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    errors.Unavailable: StatusRow(grpc.StatusCode.UNAVAILABLE, "NOT_SERVING"),
    errors.FailedPrecondition: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    errors.StaleEpoch: StatusRow(grpc.StatusCode.ABORTED, "STALE_EPOCH"),
    errors.FellBehind: StatusRow(grpc.StatusCode.ABORTED, "FELL_BEHIND"),
    errors.RevisionGone: StatusRow(grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE"),
    errors.ComputationFailed: StatusRow(grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED"),
    errors.SequenceFailed: StatusRow(grpc.StatusCode.INTERNAL, "SEQUENCE_FAILED"),
    errors.Unauthenticated: StatusRow(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.PermissionDenied: StatusRow(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    errors.NotImplementedYet: StatusRow(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED"),
}


def status_row(error: errors.PageKVError) -> StatusRow:
    """The row of the table for an error."""
    return next(row for cls, row in STATUS_TABLE.items() if isinstance(error, cls))


def status_proto(error: errors.PageKVError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo and the other google.rpc details that this kind of error has."""
    row = status_row(error)
    # Descriptions are clipped: they may quote what a client sent, and trailing metadata is limited to 8 KiB.
    message = str(error)[:MAX_CHARACTERS]
    status = status_pb2.Status(code=code_pb2.Code.Value(row.code.name), message=message)
    info = error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    for detail in (info, *_more_details(error, message)):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _more_details(error: errors.PageKVError, message: str) -> Iterator[Message]:
    if isinstance(error, errors.InvalidRequest):
        description = error.description[:MAX_CHARACTERS]
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, (errors.NotFound, errors.AlreadyExists)):
        yield error_details_pb2.ResourceInfo(resource_type=error.kind, resource_name=error.name[:MAX_CHARACTERS])
    if isinstance(error, errors.FailedPrecondition):
        unmet = error_details_pb2.PreconditionFailure.Violation(
            type=error.kind, subject=error.subject[:MAX_CHARACTERS], description=message
        )
        yield error_details_pb2.PreconditionFailure(violations=[unmet])
    if isinstance(error, (errors.Overloaded, errors.Unavailable)):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: errors.PageKVError) -> None:
    """Ends a call with the error's status; never returns normally."""
    status = status_proto(error)
    await context.abort(status_row(error).code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
