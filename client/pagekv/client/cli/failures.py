"""Failures of a command for scripts: exit statuses to branch on, and one line of JSON."""

from __future__ import annotations

import json

from pagekv.client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PageKVError,
    PermissionDenied,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from pagekv.common.statuses import status_row

EXIT_STATUS = """\
Exit status: 0 done, and what was to be ended or removed is gone, whether it was there or not; 1 failed;
2 wrong usage; 3 not reachable or not serving; 4 too much waits, try again; 130 Ctrl-C.
"""
# Of errors that are none of the manager's: gRPC's own, and a proxy's.
_OWN_CODES: dict[type[PageKVError], str] = {
    Cancelled: "CANCELLED",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    PermissionDenied: "PERMISSION_DENIED",
    Unauthenticated: "UNAUTHENTICATED",
}


def exit_status(error: PageKVError) -> int:
    """As EXIT_STATUS says."""
    return 3 if isinstance(error, Unavailable) else 4 if isinstance(error, Overloaded) else 1


def as_json(error: PageKVError) -> str:
    """`{"error": {...}}` on one line: code and message always, reason, field and retry_delay_s where there are any."""
    found: dict[str, object] = {}
    if isinstance(error, ServerError):
        found["code"] = error.code
        if error.reason:
            found["reason"] = error.reason
    elif type(error) in _OWN_CODES:
        found["code"] = _OWN_CODES[type(error)]
    else:
        row = status_row(error)
        found |= {"code": row.code.name, "reason": row.reason}
    if isinstance(error, InvalidRequest):
        found["field"] = error.field
    if isinstance(error, (Overloaded, Unavailable)):
        found["retry_delay_s"] = error.retry_delay_s
    return json.dumps({"error": {**found, "message": str(error)}})
