"""A failure as programs read it: the one line of JSON that every command with --json writes."""

from __future__ import annotations

import json

# The two codes that are not names of gRPC statuses: the command line is wrong; the command itself failed.
USAGE = "USAGE"
FAILED = "FAILED"


def error_line(code: str, message: str, **facts: object) -> str:
    """`{"error": {"code", ..., "message"}}` with the facts in between, and no line end."""
    return json.dumps({"error": {"code": code, **facts, "message": message}})
