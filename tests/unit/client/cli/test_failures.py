"""Exit statuses and JSON lines of commands that fail."""

from __future__ import annotations

import json

import pytest
from support.clients.scripted_server import Fails, ScriptedServer
from support.clients.stack import environment

from pagekv.client.cli.commands import replay
from pagekv.client.cli.failures import Failure, as_json, exit_status
from pagekv.client.cli.main import main
from pagekv.client.cli.parser import UsageError
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
    Unavailable,
    Unreachable,
)
from pagekv.client.launcher.errors import StackError


@pytest.mark.parametrize(
    ("error", "status", "fields"),
    [
        (InvalidRequest("prompt", "must be set"), 1,
         {"code": "INVALID_ARGUMENT", "reason": "INVALID_FIELD", "field": "prompt"}),
        (Overloaded("full", 2.5), 4, {"code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "retry_delay_s": 2.5}),
        (Unavailable("loading", 2.0), 3, {"code": "UNAVAILABLE", "reason": "NOT_SERVING", "retry_delay_s": 2.0}),
        # No manager has said anything, neither a reason nor when to come back.
        (Unreachable("nobody"), 3, {"code": "UNAVAILABLE"}),
        (ConnectionLost("gone"), 3, {"code": "UNAVAILABLE"}),
        (PageKVError("not installed"), 1, {"code": "FAILED"}),
        (UsageError("one of two"), 2, {"code": "USAGE"}),
        (StackError("died"), 1, {"code": "FAILED"}),
        (StackError("refuses its command line", exit_status=2), 2, {"code": "USAGE"}),
        (DeadlineExceeded("late"), 1, {"code": "DEADLINE_EXCEEDED"}),
        (ServerError("DATA_LOSS", "odd"), 1, {"code": "DATA_LOSS"}),
        (ServerError("INTERNAL", "no", "COMPUTATION_FAILED"), 1, {"code": "INTERNAL", "reason": "COMPUTATION_FAILED"}),
        (Cancelled("here"), 1, {"code": "CANCELLED"}),
        (Unauthenticated("who"), 1, {"code": "UNAUTHENTICATED", "reason": "UNAUTHENTICATED"}),
        (PermissionDenied("not you"), 1, {"code": "PERMISSION_DENIED", "reason": "PERMISSION_DENIED"}),
    ],
)  # fmt: skip  # laid out as a table
def test_every_failure_has_a_status_and_a_line(error: Failure, status: int, fields: dict[str, object]) -> None:
    assert exit_status(error) == status
    assert json.loads(as_json(error)) == {"error": {**fields, "message": str(error)}}


def test_with_json_a_failure_is_one_line_of_json(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Tokenize", Fails(Overloaded("full", 2.0)))
    assert main(["tokenize", "x", "--json"]) == 4
    out, err = capsys.readouterr()
    assert (out, json.loads(err)["error"]["reason"]) == ("", "QUEUE_FULL")


@pytest.mark.parametrize(
    ("command", "status", "code", "message"),
    [
        ("generate x --temperature hot", 2, "USAGE", "argument --temperature: must be a number, got 'hot'"),
        ("pin x --lease 0", 2, "USAGE", "argument --lease: must be a whole number from 1 to 86400, got '0'"),
        ("generate", 2, "USAGE", "exactly one of PROMPT and --token-ids is required"),
        ("nope", 2, "USAGE", "no command 'nope'"),
        ("", 2, "USAGE", "the following arguments are required: COMMAND"),
        ("stats --max-token 5", 2, "USAGE", "unrecognized arguments: --max-token 5"),
        ("plan /no/such/model", 2, "USAGE", "'/no/such/model' is neither a model directory"),
        ("tokenize --chat /no/such.json", 2, "USAGE", "--chat: /no/such.json: cannot be read: No such file"),
        ("up --manager-args=--listen=x", 2, "USAGE", "--manager-args: set addresses with"),
        ("up --no-http --http-port 8080", 2, "USAGE", "--http-port: not allowed with argument --no-http"),
        ("up --port 7 --executor-port 7 --no-http", 1, "FAILED", "two processes cannot use the same port"),
        ("replay /no/such.jsonl", 1, "FAILED", "/no/such.jsonl: No such file or directory"),
        ("replay --blocks none x", 2, "USAGE", "argument --blocks: each must be"),
    ],
)
def test_with_json_wrong_usage_and_failures_of_the_command_itself_are_one_line_too(
    command: str,
    status: int,
    code: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])  # of the process that replays
    try:
        ended: object = main(["--json", *command.split()])
    except SystemExit as exit:
        ended = exit.code
    out, err = capfd.readouterr()
    assert (ended, out, err.count("\n")) == (status, "", 1), err
    found = json.loads(err)["error"]
    assert found["code"] == code
    assert message in found["message"]


def test_what_is_not_installed_is_a_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "find_spec", lambda name: None)
    assert main(["--json", "replay", "x"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "FAILED"
