"""Converts gRPC statuses back to exceptions: by code and reason as in `pagekv.common.statuses`, else by the code alone.

Every call of the clients raises subclasses of `PageKVError` and no exceptions of gRPC, also for reasons that only later
servers know.
"""

from __future__ import annotations

import re
from inspect import signature
from math import ceil
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pagekv.client.proxy import proxy_variable
from pagekv.common.errors import (
    AlreadyExists,
    ComputationFailed,
    Draining,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotImplementedYet,
    OutOfMemory,
    Overloaded,
    PageKVError,
    PermissionDenied,
    RevisionGone,
    SequenceFailed,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)
from pagekv.common.statuses import ERROR_DOMAIN, STATUS_DETAILS_KEY, STATUS_TABLE

__all__ = [
    "AlreadyExists", "Cancelled", "ConnectionLost", "DataLoss", "DeadlineExceeded", "Draining",
    "FailedPrecondition", "FellBehind", "InvalidRequest", "LimitExceeded", "NotFound", "Overloaded",
    "PageKVError", "PermissionDenied", "RevisionGone", "SequenceFailed", "ServerError", "Unauthenticated",
    "Unavailable", "Unreachable",
]  # fmt: skip  # one name a line would fill a screen


class DeadlineExceeded(PageKVError, TimeoutError):
    """The time given for the call has passed; the server has dropped the request."""


class Cancelled(PageKVError):
    """The call was cancelled here."""


class Unreachable(Unavailable, ConnectionError):
    """No connection could be made: nothing listens there, or the name does not resolve."""


class ConnectionLost(Unavailable, ConnectionError):
    """The connection broke while the call was running."""


class ServerError(PageKVError):
    """Any other failure. `code` is the name of the gRPC status, such as INTERNAL; `reason` is the ErrorReason that the
    server gave, such as COMPUTATION_FAILED, or "".
    """

    def __init__(self, code: str, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class DataLoss(ServerError):
    """The messages of an answer do not fit together: tokens or sequences are missing or come twice."""

    def __init__(self, message: str) -> None:
        super().__init__("DATA_LOSS", message)


# Without the exceptions that are of no use to a caller: a caller can do nothing about a failed computation, PageKV
# serves every call of the clients (see UNIMPLEMENTED in `_without_class`), and an executor reports memory and epochs
# only to the manager.
_CLASSES: dict[tuple[grpc.StatusCode, str], type[PageKVError]] = {
    (row.code, row.reason): cls
    for cls, row in STATUS_TABLE.items()
    if cls not in (ComputationFailed, NotImplementedYet, OutOfMemory, StaleEpoch)
}
# For reasons of later servers, and for statuses of proxies and of gRPC itself, which have no reason. Other codes say
# too little to choose a class.
_BY_CODE: dict[grpc.StatusCode, type[PageKVError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
_NUMBERS = ("needed_blocks", "available_blocks", "pinned_blocks", "limit")  # of ErrorInfo.metadata
# gRPC's messages for a connection that was never made. Only the message distinguishes it from a connection that broke:
# the status code is the same.
_NEVER_CONNECTED = (
    "failed to connect",
    "resolution failed",
    "resolver error",
    "errors resolving",
    "Failed to create secure",
)
# gRPC's messages for a handshake that failed, and their meaning; the first match counts. A server that requires TLS, or
# another certificate than the client's, gives no reason: it closes the connection before the first call. So does a
# proxy behind which no manager listens.
_HANDSHAKES = (
    ("WRONG_VERSION_NUMBER", "it answers without TLS: leave --ca and --client-cert out (in Python credentials, too)"),
    (
        "Failed parsing HTTP/2",
        "it does not speak gRPC: is this the port of the live page, or of a gateway? Name the manager's port with "
        "--target (target= in Python)",
    ),
    (
        "certificate has expired",
        "its certificate, or that of its authority, has expired by this machine's clock: renew it, or set the clock",
    ),
    (
        "certificate is not yet valid",
        "its certificate, or that of its authority, is not valid yet by this machine's clock: set the clocks of both",
    ),
    (
        "local issuer certificate",
        "its certificate is not signed by an authority trusted here: name its authority with --ca (ca= in Python)",
    ),
    (
        # Of an authority with the same name and another key.
        "certificate signature failure",
        "its certificate is signed by another authority than the one given here (--ca; ca= in Python), which has the "
        "same name",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate was refused"),
    (
        "Hostname Verification Check failed",
        "its certificate is not for this name; call it by a name that the certificate has",
    ),
    (
        "Socket closed",
        "it closes every connection at once: does it want TLS (--ca; ca= in Python), or a client certificate of an "
        "authority that it trusts, which has not expired by its clock (--client-cert; client_cert=)? Or does a proxy "
        "there find no manager?",
    ),
)
# The message of gRPC's server for a request above its size limit, which never reaches code that could name a field.
_TOO_LARGE = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
# The messages in `_NEVER_CONNECTED` that mean a host name without an address.
_NO_SUCH_NAME = ("Domain name not found", "hostname lookup error")
# The manager's message for a call without a key and a certificate, and how a caller gives them.
_NO_IDENTITY = "no identity"
_GIVE_IDENTITY = " (--api-key or PAGEKV_API_KEY, --client-cert; api_key= and client_cert= in Python)"
# Seconds until a call may be made again, if the server does not say.
_RETRY_DELAY_S = 1.0
# gRPC's messages for a cancellation that began on this side.
_CANCELLED_HERE = ("Locally cancelled", "Channel closed")


def cancelled_here(target: str) -> Cancelled:
    """The exception for a call to `target` that this side ended, as by closing the client."""
    return Cancelled(f"the call to PageKV at {target} was cancelled")


def from_rpc_error(error: grpc.RpcError, target: str) -> PageKVError:
    """The exception for a failed call of a sync or asyncio stub to `target`."""
    # Any: stubs raise an RpcError that also has the methods of a Call; grpc has no type for both.
    call: Any = error
    code, message = call.code() or grpc.StatusCode.UNKNOWN, call.details() or ""
    found: dict[str, Any] = {}
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            found |= _details(value)
    reason = found.get("reason")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(message)):
        return InvalidRequest("request", f"must be at most {sizes[2]} bytes as a message, has {sizes[1]}")
    # UNAVAILABLE without a reason usually comes from gRPC itself: there is no connection.
    by_code = None if code is grpc.StatusCode.UNAVAILABLE and reason is None else _BY_CODE.get(code)
    cls = _CLASSES.get((code, reason or ""), by_code)
    if cls is None:
        return _without_class(code, reason, message, target)
    if cls is LimitExceeded and "retry_delay_s" in found:
        cls = Overloaded
    if issubclass(cls, Unavailable):
        message = f"PageKV at {target} is not serving: {message}"
    elif issubclass(cls, (Unauthenticated, PermissionDenied)):
        hint = _GIVE_IDENTITY if message.startswith(_NO_IDENTITY) else ""
        message = f"{target} refuses the call: {message}{hint}"
    elif issubclass(cls, Overloaded):
        message += f"; try again in {ceil(found.get('retry_delay_s', _RETRY_DELAY_S))} s"
    known = signature(cls).parameters
    facts = {"description": message, "field": "", "retry_delay_s": _RETRY_DELAY_S, **found, "message": message}
    return cls(**{name: facts[name] for name in known if name in facts})


def _without_class(code: grpc.StatusCode, reason: str | None, message: str, target: str) -> PageKVError:
    """The exception for a status that neither table has."""
    match code, reason:
        case grpc.StatusCode.UNAVAILABLE, None:
            if any(words in message for words in _NEVER_CONNECTED):
                variable = proxy_variable(target)
                through = f" through the proxy that the variable {variable} names" if variable else ""
                for words, meaning in _HANDSHAKES:
                    if words in message:
                        return Unreachable(f"cannot reach PageKV at {target}{through}: {meaning}")
                # Of both names gRPC then looks up the proxy's alone.
                if through:
                    return Unreachable(
                        f"cannot reach PageKV at {target}{through}: is it running, and does it reach PageKV? To "
                        "connect without it, name PageKV's host in no_proxy"
                    )
                if any(words in message for words in _NO_SUCH_NAME):
                    return Unreachable(
                        f"cannot reach PageKV at {target}: no address is known for this name; check its spelling and "
                        "this machine's DNS, or name another address with --target (target= in Python)"
                    )
                return Unreachable(
                    f"cannot reach PageKV at {target}: is it running? Start it with `pagekv up` "
                    "or name another address with --target (target= in Python)"
                )
            return ConnectionLost(f"the connection to PageKV at {target} was lost: {message}")
        case grpc.StatusCode.CANCELLED, None:
            if any(words in message for words in _CANCELLED_HERE):
                return cancelled_here(target)
            # A gRPC server that shuts down cancels calls that it has not accepted yet
            # (github.com/grpc/grpc/issues/41785).
            return ConnectionLost(f"PageKV at {target} shut down before it took the call")
        case grpc.StatusCode.DEADLINE_EXCEEDED, _:
            return DeadlineExceeded(
                f"PageKV at {target} did not finish in time; allow more with --timeout (timeout= in Python)"
            )
        case grpc.StatusCode.UNIMPLEMENTED, None:
            message = (
                f"the server at {target} does not know this call: is it a PageKV manager, not an executor or a "
                f"gateway? ({message})"
            )
            return ServerError(code.name, message)
    return ServerError(code.name, f"PageKV at {target} failed with {code.name}: {message}", reason or "")


def _details(raw: bytes) -> dict[str, Any]:
    """Arguments of exceptions by name, and the reason if it belongs to PageKV's error domain."""
    try:
        status = status_pb2.Status.FromString(raw)
        return {name: value for detail in status.details for name, value in _detail(detail).items()}
    except DecodeError:
        # Details of a proxy or a later version: the status code alone still says enough.
        return {}


def _detail(detail: AnyMessage) -> dict[str, Any]:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    resource, state = error_details_pb2.ResourceInfo(), error_details_pb2.PreconditionFailure()
    if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
        numbers = {name: int(fact) for name, fact in info.metadata.items() if name in _NUMBERS and fact.isdecimal()}
        texts = {name: info.metadata.get(name, "") for name in ("flag", "server_version")}
        return {"reason": info.reason, **texts, **numbers}
    if detail.Unpack(bad) and bad.field_violations:
        violation = bad.field_violations[0]
        return {"field": violation.field, "description": violation.description}
    if detail.Unpack(resource):
        return {"kind": resource.resource_type, "name": resource.resource_name}
    if detail.Unpack(state) and state.violations:
        return {"kind": state.violations[0].type, "subject": state.violations[0].subject}
    if detail.Unpack(retry):
        return {"retry_delay_s": retry.retry_delay.ToTimedelta().total_seconds()}
    return {}
