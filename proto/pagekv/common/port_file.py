"""The file of --port-file: one JSON line that says where a process listens, written once that is so, and how its start
goes on.

    {"listen": "127.0.0.1:50051", "http": "127.0.0.1:8080", "kv_events": {"endpoint": "tcp://127.0.0.1:5557",
     "replay_endpoint": ""}, "recordings": ["/tmp/requests.jsonl"]}

Ports are those that were bound, where a flag asks for port 0. `listen` is there once the process listens and may be
unix:/path; `gateway`, an address too, `http`, `kv_events` and `recordings` are the manager's, each there only where its
flag turns it on. Two more are there for a while: `phase`, `{"name": "loading the weights", "percent": 34}` (null where
nobody counts), while a start takes long; and `cannot_start`, the reason in words, when the process ends because of it,
which is all there is where that was before it listened.
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
    """Adds facts to the line, and leaves out those that are None; nothing where there is no file, which says that the
    process listens. From any thread, and never an error: the work that is told of is more important.
    """
    with _writing, suppress(OSError, ValueError):
        if told := read_port_file(Path(path)):
            write_port_file(Path(path), {key: value for key, value in (told | facts).items() if value is not None})


def tell_cannot_start(path: str, reason: str) -> None:
    """Says in the file why a process that does not listen cannot start; nothing without a path, and never an error."""
    with suppress(OSError):
        if path:
            write_port_file(Path(path), {"cannot_start": reason})
