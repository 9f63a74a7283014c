"""From gRPC statuses back to exceptions, by the table of `pagekv.common.statuses`.

Every call of the clients raises subclasses of `PageKVError` and nothing of gRPC's.
"""

from __future__ import annotations

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
from pagekv.common.statuses import ERROR_DOMAIN, STATUS_DETAILS_KEY, STATUS_TABLE

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


_CLASSES: dict[tuple[grpc.StatusCode, str], type[PageKVError]] = {
    **{(row.code, row.reason): cls for cls, row in STATUS_TABLE.items()},
    # Without a reason: not from a PageKV handler, but from gRPC itself or a proxy.
    (grpc.StatusCode.NOT_FOUND, ""): NotFound,
}
# How gRPC words a connection that was never made. Only this text tells it from one that broke: the code is the same.
_NEVER_CONNECTED = (
    "failed to connect",
    "resolution failed",
    "resolver error",
    "errors resolving",
    "Failed to create secure",
)
# How gRPC words a cancellation that began on this side.
_CANCELLED_HERE = ("Locally cancelled", "Channel closed")


def from_rpc_error(error: grpc.RpcError, target: str) -> PageKVError:
    """The exception for a failed call of a sync or asyncio stub to `target`."""
    # Any: what stubs raise is an RpcError with the methods of a Call, which no common type of grpc's says.
    call: Any = error
    code, message = call.code() or grpc.StatusCode.UNKNOWN, call.details() or ""
    details: dict[str, Any] = {}
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            details |= _details(value)
    reason, delay_s = details.get("reason", ""), details.get("retry_delay_s", 1.0)
    cls = _CLASSES.get((code, reason))
    if cls is None:
        return _without_class(code, reason, message, target)
    if issubclass(cls, InvalidRequest):
        return cls(details.get("field", ""), details.get("description", ""))
    if issubclass(cls, Unavailable):
        return cls(f"PageKV at {target} is not serving: {message}", delay_s)
    return cls(message, delay_s) if issubclass(cls, Overloaded) else cls(message)


def _without_class(code: grpc.StatusCode, reason: str, message: str, target: str) -> PageKVError:
    """The exception for a status that the servers' table does not have."""
    match code, reason:
        case grpc.StatusCode.UNAVAILABLE, "":
            if any(words in message for words in _NEVER_CONNECTED):
                return Unreachable(
                    f"cannot reach PageKV at {target}: is it running? Start it with `pagekv up` "
                    "or name another address with --target (target= in Python)"
                )
            return ConnectionLost(f"the connection to PageKV at {target} was lost: {message}")
        case grpc.StatusCode.CANCELLED, "":
            if any(words in message for words in _CANCELLED_HERE):
                return Cancelled(f"the call to PageKV at {target} was cancelled")
            # A gRPC server that shuts down cancels calls that it has not looked at (github.com/grpc/grpc/issues/41785).
            return ConnectionLost(f"PageKV at {target} shut down before it took the call")
        case grpc.StatusCode.DEADLINE_EXCEEDED, "":
            return DeadlineExceeded(f"PageKV at {target} did not finish in time; allow more with timeout=")
        case grpc.StatusCode.UNIMPLEMENTED, "":
            message = f"the server at {target} does not know this call: is it a PageKV manager? ({message})"
            return ServerError(code.name, message)
    return ServerError(code.name, f"PageKV at {target} failed with {code.name}: {message}")


def _details(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
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
