"""From gRPC statuses back to exceptions: one table, the mirror of `pagekv.common.statuses.STATUS_TABLE`.

Every call of the clients raises subclasses of `PageKVError` and nothing of gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pagekv.common.errors import (
    AlreadyExists,
    ComputationFailed,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotImplementedYet,
    OutOfMemory,
    Overloaded,
    PageKVError,
    StaleEpoch,
    Unavailable,
)
from pagekv.common.statuses import ERROR_DOMAIN, STATUS_DETAILS_KEY

__all__ = [
    "AlreadyExists", "Cancelled", "ComputationFailed", "ConnectionLost", "DeadlineExceeded", "FailedPrecondition",
    "FellBehind", "InvalidRequest", "LimitExceeded", "NotFound", "NotImplementedYet", "OutOfMemory", "Overloaded",
    "PageKVError", "ServerError", "StaleEpoch", "Unavailable", "Unreachable",
]  # fmt: skip  # one name a line would fill a screen


class DeadlineExceeded(PageKVError):
    """The time given for the call has passed; the server has dropped the request."""


class Cancelled(PageKVError):
    """The call was cancelled here."""


class Unreachable(Unavailable):
    """No connection could be made: nothing listens there, or the name does not resolve."""


class ConnectionLost(Unavailable):
    """The connection broke while the call was running."""


class ServerError(PageKVError):
    """Any other failure; `code` is the gRPC status name, such as INTERNAL."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A status taken apart; what the server did not send is empty."""

    code: grpc.StatusCode
    message: str
    target: str
    reason: str = ""
    field: str = ""
    description: str = ""
    retry_delay_s: float = 1.0


# (status, ErrorInfo.reason) to exception. An empty reason is for statuses that did not come from a PageKV handler: gRPC
# itself, a proxy. Any other pair is a ServerError.
EXCEPTIONS: dict[tuple[grpc.StatusCode, str], Callable[[RequestFailure], PageKVError]] = {
    (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"): lambda f: AlreadyExists(f.field, f.description),
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"): lambda f: InvalidRequest(f.field, f.description),
    (grpc.StatusCode.NOT_FOUND, "NOT_FOUND"): lambda f: NotFound(f.message),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"): lambda f: Overloaded(f.message, f.retry_delay_s),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"): lambda f: LimitExceeded(f.message),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"): lambda f: OutOfMemory(f.message),
    (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING"): lambda f: Unavailable(
        f"PageKV at {f.target} is not serving: {f.message}", f.retry_delay_s
    ),
    (grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"): lambda f: FailedPrecondition(f.message),
    (grpc.StatusCode.ABORTED, "STALE_EPOCH"): lambda f: StaleEpoch(f.message),
    (grpc.StatusCode.ABORTED, "FELL_BEHIND"): lambda f: FellBehind(f.message),
    (grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED"): lambda f: ComputationFailed(f.message),
    (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED"): lambda f: NotImplementedYet(f.message),
    (grpc.StatusCode.NOT_FOUND, ""): lambda f: NotFound(f.message),
    (grpc.StatusCode.UNAVAILABLE, ""): lambda f: _unavailable(f),
    (grpc.StatusCode.UNIMPLEMENTED, ""): lambda f: ServerError(
        "UNIMPLEMENTED", f"the server at {f.target} does not know this call: is it a PageKV manager? ({f.message})"
    ),
    (grpc.StatusCode.DEADLINE_EXCEEDED, ""): lambda f: DeadlineExceeded(
        f"PageKV at {f.target} did not finish in time; allow more with timeout="
    ),
    (grpc.StatusCode.CANCELLED, ""): lambda f: _cancelled(f),
}

# How gRPC words a connection that was never made. Only this text tells it from one that broke: the code is the same.
_NEVER_CONNECTED = (
    "failed to connect",
    "resolution failed",
    "resolver error",
    "errors resolving",
    "Failed to create secure",
)


def _unavailable(failure: RequestFailure) -> PageKVError:
    if any(words in failure.message for words in _NEVER_CONNECTED):
        return Unreachable(
            f"cannot reach PageKV at {failure.target}: is it running? Start it with `pagekv up` "
            "or name another address with --target (target= in Python)"
        )
    return ConnectionLost(f"the connection to PageKV at {failure.target} was lost: {failure.message}")


# How gRPC words a cancellation that began on this side.
_CANCELLED_HERE = ("Locally cancelled", "Channel closed")


def _cancelled(failure: RequestFailure) -> PageKVError:
    if any(words in failure.message for words in _CANCELLED_HERE):
        return Cancelled(f"the call to PageKV at {failure.target} was cancelled")
    # A gRPC server that shuts down cancels calls that it has not looked at yet (github.com/grpc/grpc/issues/41785).
    return ConnectionLost(f"PageKV at {failure.target} shut down before it took the call")


def from_rpc_error(error: grpc.RpcError, target: str) -> PageKVError:
    """The exception for a failed call of a sync or asyncio stub to `target`."""
    failure = _take_apart(error, target)
    build = EXCEPTIONS.get((failure.code, failure.reason))
    if build is not None:
        return build(failure)
    return ServerError(failure.code.name, f"PageKV at {target} failed with {failure.code.name}: {failure.message}")


def _take_apart(error: grpc.RpcError, target: str) -> RequestFailure:
    # Any: what stubs raise is an RpcError with the methods of a Call, which no common type of grpc's says.
    call: Any = error
    code = call.code() or grpc.StatusCode.UNKNOWN
    message = call.details() or ""
    found: dict[str, Any] = {}
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            found |= _details(value)
    return RequestFailure(code=code, message=message, target=target, **found)


def _details(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            info, bad, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                found["reason"] = info.reason
            elif detail.Unpack(bad) and bad.field_violations:
                found["field"] = bad.field_violations[0].field
                found["description"] = bad.field_violations[0].description
            elif detail.Unpack(retry):
                found["retry_delay_s"] = retry.retry_delay.ToTimedelta().total_seconds()
    except DecodeError:
        # Details of a proxy or a later version: the status code alone still says enough.
        return {}
    return found
