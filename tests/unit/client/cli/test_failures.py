"""Exit statuses and JSON lines of commands that fail."""

from __future__ import annotations

import json

import pytest
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client.cli.failures import as_json, exit_status
from pagekv.client.cli.main import main
from pagekv.client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PageKVError,
    PermissionDenied,
    ServerError,
    Unauthenticated,
    Unreachable,
)


@pytest.mark.parametrize(
    ("error", "status", "fields"),
    [
        (InvalidRequest("prompt", "must be set"), 1,
         {"code": "INVALID_ARGUMENT", "reason": "INVALID_FIELD", "field": "prompt"}),
        (Overloaded("full", 2.5), 4, {"code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "retry_delay_s": 2.5}),
        (Unreachable("nobody"), 3, {"code": "UNAVAILABLE", "reason": "NOT_SERVING", "retry_delay_s": 1.0}),
        (ConnectionLost("gone"), 3, {"code": "UNAVAILABLE", "reason": "NOT_SERVING", "retry_delay_s": 1.0}),
        (DeadlineExceeded("late"), 1, {"code": "DEADLINE_EXCEEDED"}),
        (ServerError("DATA_LOSS", "odd"), 1, {"code": "DATA_LOSS"}),
        (ServerError("INTERNAL", "no", "COMPUTATION_FAILED"), 1, {"code": "INTERNAL", "reason": "COMPUTATION_FAILED"}),
        (Cancelled("here"), 1, {"code": "CANCELLED"}),
        (Unauthenticated("who"), 1, {"code": "UNAUTHENTICATED"}),
        (PermissionDenied("not you"), 1, {"code": "PERMISSION_DENIED"}),
    ],
)  # fmt: skip  # laid out as a table
def test_every_failure_has_a_status_and_a_line(error: PageKVError, status: int, fields: dict[str, object]) -> None:
    assert exit_status(error) == status
    assert json.loads(as_json(error)) == {"error": {**fields, "message": str(error)}}


def test_with_json_a_failure_is_one_line_of_json(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Tokenize", Fails(Overloaded("full", 2.0)))
    assert main(["tokenize", "x", "--json"]) == 4
    out, err = capsys.readouterr()
    assert (out, json.loads(err)["error"]["reason"]) == ("", "QUEUE_FULL")
