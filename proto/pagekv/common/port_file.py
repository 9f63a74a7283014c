"""The file of --port-file: one JSON line that says where a process listens, written when it listens, and how its start
proceeds.

    {"listen": "127.0.0.1:50051", "http": "127.0.0.1:8080", "kv_events": {"endpoint": "tcp://127.0.0.1:5557",
     "replay_endpoint": ""}, "recordings": ["/tmp/requests.jsonl"]}

If a flag asks for port 0, the line has the port that was bound. `listen` (host:port or unix:/path) is there as soon as
the process listens. `gateway` (an address), `http`, `kv_events` and `recordings` are only a manager's, and only if
their flag turns them on. Two fields are there for a while. `phase` is `{"name": "loading the weights", "percent": 34}`
during a long start, with null for progress that is not measured. `cannot_start` is the reason, in words, for which the
process ends; if it ends before it listens, the line has no other field.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_writing = threading.Lock()


def bound_address(listen: str, port: int) -> str:
    """`listen`, host:port or unix:/path, with the port that was bound."""
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def write_port_file(path: Path, listening: Mapping[str, Any]) -> None:
    """Writes the line so that a reader sees all of it or no file. Raises OSError, which names the flag and the file."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(json.dumps(listening) + "\n")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OSError(f"--port-file {path}: cannot be written: {error.strerror}") from error


def read_port_file(path: Path) -> dict[str, Any]:
    """The line in `path`; empty while there is no such file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    listening: dict[str, Any] = json.loads(text)
    return listening


def add_to_port_file(path: str, **facts: Any) -> None:
    """Adds `facts` to the line, and removes those that are None. Does nothing if there is no file, because a file means
    that the process listens. From any thread, and never an error: the reported work is more important.
    """
    with _writing, suppress(OSError, ValueError):
        if told := read_port_file(Path(path)):
            write_port_file(Path(path), {key: value for key, value in (told | facts).items() if value is not None})


def tell_cannot_start(path: str, reason: str) -> None:
    """Writes to the file why a process that does not listen cannot start. Does nothing without a path; never raises."""
    with suppress(OSError):
        if path:
            write_port_file(Path(path), {"cannot_start": reason})
