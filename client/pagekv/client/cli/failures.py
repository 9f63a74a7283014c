"""Failures of a command for scripts: exit statuses to branch on, and one line of JSON."""

from __future__ import annotations

from typing import TypeAlias

from pagekv.client.cli.parser import UsageError
from pagekv.client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PageKVError,
    ServerError,
    Unavailable,
    Unreachable,
)
from pagekv.client.launcher.errors import StackError
from pagekv.common.error_line import FAILED, USAGE, error_line
from pagekv.common.statuses import status_row

EXIT_STATUS = """\
Exit status: 0 done, also if what was to be ended or removed did not exist, and after Ctrl-C of pagekv up, and of
pagekv top or pagekv stats --watch without --json; 1 failed; 2 wrong usage; 3 not reachable or not serving; 4 the server
is overloaded, try again; 130 Ctrl-C of any other command.
"""
# An exception that ends a command; its message is the line that says why.
Failure: TypeAlias = PageKVError | UsageError | StackError
# Codes of errors that come from the command itself or gRPC, not from the manager, and therefore have no reason.
_OWN_CODES: dict[type[PageKVError], str] = {
    PageKVError: FAILED,
    Cancelled: "CANCELLED",
    ConnectionLost: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Unreachable: "UNAVAILABLE",
}


def exit_status(failure: Failure) -> int:
    if isinstance(failure, UsageError):
        return 2
    if isinstance(failure, StackError):
        return failure.exit_status
    return 3 if isinstance(failure, Unavailable) else 4 if isinstance(failure, Overloaded) else 1


def as_json(failure: Failure) -> str:
    """`{"error": {...}}` on one line: always code and message; reason, field, retry_delay_s if the failure has them."""
    code, facts = FAILED, dict[str, object]()
    if not isinstance(failure, PageKVError):
        code = USAGE if exit_status(failure) == 2 else FAILED
    elif isinstance(failure, ServerError):
        code = failure.code
        if failure.reason:
            facts["reason"] = failure.reason
    elif type(failure) in _OWN_CODES:
        code = _OWN_CODES[type(failure)]
    else:
        row = status_row(failure)
        code, facts["reason"] = row.code.name, row.reason
        if isinstance(failure, InvalidRequest):
            facts["field"] = failure.field
        if isinstance(failure, (Overloaded, Unavailable)):
            facts["retry_delay_s"] = failure.retry_delay_s
    return error_line(code, str(failure), **facts)
