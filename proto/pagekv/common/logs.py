"""Structured logs on standard error: `key=value` text for people, one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, TextIO

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
# The beginning of an error's first line, in either format.
_ERROR = re.compile(r'\S+Z (error|critical) |\{"time": "[^"]*", "level": "(error|critical)"')


def is_error(line: str) -> bool:
    """Whether a line of a process's log is the first line of an error."""
    return _ERROR.match(line) is not None


class _Formatter(logging.Formatter):
    def __init__(self, service: str, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        if self._as_json:
            head = {"time": stamp, "level": record.levelname.lower(), "service": self._service}
            return json.dumps({**head, "message": record.getMessage(), **fields}, default=str)
        tail = "".join(f" {key}={_quote(value)}" for key, value in fields.items() if key != "exception")
        trace = f"\n{fields['exception']}" if "exception" in fields else ""
        return f"{stamp} {record.levelname.lower():7} {self._service}: {record.getMessage()}{tail}{trace}"


def _quote(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if any(c.isspace() or c == '"' for c in text) else text


class _LossyHandler(logging.Handler):
    """Writes lines to standard error without waiting for the reader of a pipe or a socket, or for a stopped terminal.
    Lines without room, also on a full disk, are lost, so that serving does not stop; the next line says how many.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._terminal = _opened_anew(stream)
        self._lost = 0
        # Whether the last line was written only in part.
        self._cut = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost:
                record = copy(record)
                record.fields = getattr(record, "fields", {}) | {"lines_lost_before": self._lost}
            whole = self._write(("\n" if self._cut else "") + self.format(record) + "\n")
        except Exception:
            whole = False
        self._lost = 0 if whole else self._lost + 1

    def _write(self, text: str) -> bool:
        """Whether there was room for the whole text. Raises OSError."""
        try:
            file = self._stream.fileno() if self._terminal is None else self._terminal
        except OSError:
            # No file of the system.
            self._stream.write(text)
            return True
        data = text.encode(self._stream.encoding, "backslashreplace")
        room = select.poll()
        room.register(file, select.POLLOUT)
        # A pipe with room takes so many bytes at once. Standard error is not made non-blocking, because that would hold
        # for all processes that share it.
        while data and room.poll(0):
            data = data[os.write(file, data[: select.PIPE_BUF]) :]
            self._cut = bool(data)
        return not data


def _opened_anew(stream: TextIO) -> int | None:
    """The terminal behind `stream`, opened for this process alone so that writes never wait. None if there is none, or
    if it may not be opened. A terminal has "room" as long as it takes one more character, and lets a longer line wait.
    """
    try:
        return os.open(os.ttyname(stream.fileno()), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (AttributeError, OSError, ValueError):
        return None


def setup_logs(service: str, level: str, fmt: str) -> None:
    """Sends the process's logs to standard error. `level` is one of LOG_LEVELS, `fmt` one of LOG_FORMATS."""
    handler = _LossyHandler(sys.stderr)
    handler.setFormatter(_Formatter(service, fmt == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The server's interceptor logs errors of handlers. gRPC itself would also log a traceback for every client that
    # disconnects while a message is written to it, which is no error of the server.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)


def refusal_in_json(
    service: str, argv: Sequence[str] | None, env: Mapping[str, str] | None
) -> Callable[[str], str] | None:
    """Makes the line of a refusal of flags, which comes before `setup_logs`; None unless --log-format asks for JSON."""
    words = sys.argv[1:] if argv is None else argv
    asked = (os.environ if env is None else env).get("PAGEKV_LOG_FORMAT", "")
    for word, following in pairwise([*words, ""]):
        if word == "--log-format":
            asked = following
        elif word.startswith("--log-format="):
            asked = word.partition("=")[2]
    if asked != "json":
        return None
    formatter = _Formatter(service, True)

    def line(reason: str) -> str:
        fields = {"reason": reason}
        return formatter.format(logging.makeLogRecord({"levelname": "ERROR", "msg": "cannot start", "fields": fields}))

    return line


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields: `log.info("attached", epoch=7)`."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {"exc_info": kwargs.pop("exc_info", None), "extra": {"fields": kwargs}}
