"""Whose work a call is, as its caller's tracing says (W3C trace context)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagekv.kvmanager.request.command import GenerateCommand


def with_caller(command: GenerateCommand, context: Any) -> GenerateCommand:
    """The command with the `traceparent` of the gRPC call it came with, if that has one."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return replace(command, trace_parent=value)
    return command
