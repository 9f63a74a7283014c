"""Every error that crosses the wire: one exception class each, and one table to gRPC statuses.

Servers raise these anywhere below a handler; `pagekv.common.server.error_interceptor` turns them into a status with
google.rpc details. Clients map statuses back with the same table (`pagekv.client.errors`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

ERROR_DOMAIN = "pagekv"
# Trailing metadata key that gRPC reserves for a serialised google.rpc.Status.
STATUS_DETAILS_KEY = "grpc-status-details-bin"


class PageKVError(Exception):
    """Base of every error with a place in the status table."""


class InvalidRequest(PageKVError):
    """A field is out of its bounds. `field` is the proto path, `description` says the bounds and the value."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class AlreadyExists(InvalidRequest):
    """The value of `field` is taken."""


class NotFound(PageKVError):
    """What was named does not exist."""


class Overloaded(PageKVError):
    """A bounded queue is full; come back in `retry_delay_s` seconds."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class LimitExceeded(PageKVError):
    """What is asked for goes beyond a limit of the deployment now; the message has what is needed and available."""


class OutOfMemory(PageKVError):
    """The pools asked for do not fit."""


class Unavailable(PageKVError):
    """Not serving now (starting, draining, executor lost); come back in `retry_delay_s` seconds."""

    def __init__(self, message: str, retry_delay_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class FailedPrecondition(PageKVError):
    """Refused in the present state."""


class StaleEpoch(PageKVError):
    """The work belongs to an epoch that is over."""


class FellBehind(PageKVError):
    """The reader of a stream took too little for too long; start again from the beginning."""


class ComputationFailed(PageKVError):
    """The model cannot compute the request: every attempt failed."""


class NotImplementedYet(PageKVError):
    """The RPC is declared and not served by this version."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How one exception class looks on the wire."""

    code: grpc.StatusCode
    reason: str


# The one table. Subclasses stand before their bases: the first match wins.
STATUS_TABLE: dict[type[PageKVError], StatusRow] = {
    AlreadyExists: StatusRow(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
    InvalidRequest: StatusRow(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    NotFound: StatusRow(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    Overloaded: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    LimitExceeded: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"),
    OutOfMemory: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"),
    Unavailable: StatusRow(grpc.StatusCode.UNAVAILABLE, "NOT_SERVING"),
    FailedPrecondition: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    StaleEpoch: StatusRow(grpc.StatusCode.ABORTED, "STALE_EPOCH"),
    FellBehind: StatusRow(grpc.StatusCode.ABORTED, "FELL_BEHIND"),
    ComputationFailed: StatusRow(grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED"),
    NotImplementedYet: StatusRow(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED"),
}


def status_row(error: PageKVError) -> StatusRow:
    """The row of the table for an error."""
    return next(row for cls, row in STATUS_TABLE.items() if isinstance(error, cls))


def status_proto(error: PageKVError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    row = status_row(error)
    # Descriptions are clipped: they may quote what a client sent, and trailing metadata is limited to 8 KiB.
    message = str(error)[:1024]
    status = status_pb2.Status(code=code_pb2.Code.Value(row.code.name), message=message)
    details: list[error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo] = [
        error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN)
    ]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description[:1024])
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, (Overloaded, Unavailable)):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: PageKVError) -> None:
    """Ends a call with the error's status; never returns normally."""
    status = status_proto(error)
    await context.abort(status_row(error).code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
